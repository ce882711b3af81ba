"""What docs/results.md says about single steps, from rows worked out by hand."""

from __future__ import annotations

from measured import at_equal_batch, at_equal_memory, at_equal_noise, sections


def step(method: str, noise: float, ratio: float, *, run: str = "2", **more: object) -> dict[str, str]:
    row = {"run": run, "revision": "abcdef123456", "model": "net", "batch": "8", "precision": "tf32", "method": method}
    numbers = {"noise_share": noise, "ledger_x_less": ratio, "step_x_plain": 1.5, **more}
    return row | {name: str(value) for name, value in numbers.items()}


def cells(lines: list[str]) -> list[list[str]]:
    """Of a table, without its heads."""
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_of_the_settings_that_add_no_more_noise_the_one_that_stores_least():
    rows = [
        step("plain", 0.0, 1.0),
        step("gact(period=8)", 0.2, 10.0),
        step("division", 0.01, 8.0),
        step("fixed", 0.02, 12.0),
        step("bold(graph=true)", 0.15, 18.0),
        step("bold:blocks", 0.3, 40.0),
    ]
    found = cells(list(at_equal_noise(rows)))
    assert [row[1:8] for row in found] == [
        ["`gact(period=8)`", "0.2", "10x", "`bold(graph=true)`", "0.15", "18x", "1.80x"]
    ], "nothing of ours is as exact as division here, and bold:blocks adds more than gact"


def test_rows_are_those_of_the_last_run_that_has_both_sides():
    rows = [step("gact", 0.2, 10.0, run="1"), step("fixed", 0.1, 15.0, run="1"), step("fixed", 0.1, 30.0, run="2")]
    assert [row[7] for row in cells(list(at_equal_noise(rows)))] == ["1.50x"]
    rows.append(step("gact", 0.2, 20.0, run="2"))
    assert [row[3] for row in cells(list(at_equal_noise(rows)))] == ["20x"]
    assert list(at_equal_noise(rows[2:3])) == [] == list(at_equal_batch(rows))


def test_steps_are_those_of_graphs():
    rows = [
        step("gact(graph=true)", 0.2, 10.0, step_x_plain=1.3),
        step("bold(graph=true)", 0.1, 18.0, step_x_plain=1.2),
        step("bold", 0.1, 18.0, step_x_plain=1.1),
    ]
    assert [row[1:3] for row in cells(list(at_equal_batch(rows)))] == [
        ["`bold(graph=true)`", "1.20x"],
        ["`gact(graph=true)`", "1.30x"],
    ]


def test_batches_are_beside_plain_training_of_their_own_run():
    def grown(method: str, batch: int, speed: float, batch_x: float, speed_x: float) -> dict[str, str]:
        row = {"model": "net", "precision": "tf32", "channels_last": "True", "cap": "16GiB", "granularity": "32"}
        row |= {"method": method, "batch": str(batch), "units_per_s": str(speed), "revision": "abcdef1"}
        return row | {"batch_x_plain": str(batch_x), "speed_x_plain": str(speed_x)}

    rows = [grown("plain", 100, 900, 1, 1), grown("plain", 160, 1000, 1, 1), grown("bold", 800, 600, 5, 0.6)]
    assert list(at_equal_memory(rows)) == [], "two are no comparison"
    found = cells(list(at_equal_memory([*rows, grown("checkpoint", 320, 750, 3.2, 0.8333)])))
    assert [row[2:6] for row in found] == [
        ["160", "1.0x", "1,000", "1.00x"],
        ["320", "3.2x", "750", "0.83x"],
        ["800", "5.0x", "600", "0.60x"],
    ]


def test_without_rows_there_is_no_section(tmp_path):
    assert list(sections(tmp_path)) == []


def test_failures_do_not_count(tmp_path):
    heads = "run,revision,model,batch,precision,method,noise_share,ledger_x_less,step_x_plain,ok"
    rows = ["1,a,net,8,tf32,gact,0.2,10,1.2,True", "1,a,net,8,tf32,fixed,0.1,15,1.2,False"]
    (tmp_path / "methods.csv").write_text("\n".join([heads, *rows]) + "\n")
    assert list(sections(tmp_path)) == []
    rows[1] = rows[1].replace("False", "True")
    (tmp_path / "methods.csv").write_text("\n".join([heads, *rows]) + "\n")
    (noise,) = sections(tmp_path)
    assert noise[0] == "## At equal gradient noise" and cells(noise)[0][7] == "1.50x"
