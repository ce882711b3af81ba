"""Work behind a step: in order, errors told, done once, and no hindrance when the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from lowtide.background import Background, Once


def test_tasks_are_done_in_order_and_errors_are_told() -> None:
    background, seen = Background("one"), []
    tasks = [background.submit(lambda number=number: seen.append(number)) for number in range(20)]
    failed = background.submit(lambda: 1 // 0)
    assert background.submit(threading.current_thread).result(60).name == "one"
    assert all(task.done() for task in tasks) and seen == list(range(20))
    with pytest.raises(ZeroDivisionError):
        failed.result()
    background.close()
    background.join()
    with pytest.raises(RuntimeError, match="one: the interpreter ends"):
        background.submit(lambda: None)


def test_several_threads_work_at_a_time() -> None:
    background, both = Background("two", 2), threading.Barrier(2)
    tasks = [background.submit(lambda: both.wait(60)) for _ in range(2)]
    assert sorted(task.result(60) for task in tasks) == [0, 1]
    background.close()


def test_the_interpreter_ends_without_what_has_not_begun() -> None:
    """Also where one thread waits for what another one has yet to begin."""
    code = """
import time
from lowtide.background import Background
first, second = Background("first"), Background("second")
def begun():
    time.sleep(0.3)
    print("ended", flush=True)
second.submit(begun)
for _ in range(100):
    later = second.submit(lambda: time.sleep(60))
first.submit(later.result)
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_what_is_done_once_is_waited_for() -> None:
    calls, may_end = [], threading.Event()

    def work(key: str) -> object:
        calls.append(key)
        assert may_end.wait(60)
        return object()

    once, results = Once(work), []
    threads = [threading.Thread(target=lambda: results.append(once("a"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    while not calls:
        time.sleep(0.001)
    once.unless_begun("a")  # returns although nobody has ended
    assert not results
    may_end.set()
    for thread in threads:
        thread.join()
    once.unless_begun("b")
    assert len(results) == 4 and len(set(results)) == 1 and once("b") is not results[0]
    assert calls == ["a", "b"]


def test_a_failure_is_not_kept() -> None:
    answers = iter([ValueError("no"), "yes"])

    def work(key: str) -> str:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    once = Once(work)
    with pytest.raises(ValueError, match="no"):
        once.unless_begun("a")
    assert once("a") == once("a") == "yes"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    background = Background("forked")
    assert background.submit(lambda: 1).result(timeout=20) == 1
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if background.submit(lambda: 2).result(timeout=20) == 2 else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
