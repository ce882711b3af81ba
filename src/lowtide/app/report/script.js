"use strict";
// Charts: the values under the mouse, or at the arrow keys. Tables: sort by a column.
(() => {
  const svgName = "http://www.w3.org/2000/svg";

  const draw = (name, attributes) => {
    const element = document.createElementNS(svgName, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };

  const nearest = (points, x) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));

  for (const plot of document.querySelectorAll(".plot")) {
    const data = JSON.parse(plot.querySelector("script").textContent);
    const lines = data.series.filter((series) => series.points.length);
    if (!lines.length) continue;
    const svg = plot.querySelector("svg");
    const cursor = plot.querySelector(".cursor");
    const readout = plot.querySelector(".readout");
    // The keyboard walks along the line with the most points.
    const guide = lines.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
    let index = -1;

    const show = (at) => {
      index = guide.indexOf(at);
      const found = lines.map((line) => [line, line.points === guide ? at : nearest(line.points, at[0])]);
      cursor.replaceChildren(
        draw("line", { x1: at[0], x2: at[0], y1: data.top, y2: data.base }),
        ...found.map(([line, point]) => {
          const group = draw("g", { class: line.class });
          group.append(draw("circle", { cx: point[0], cy: point[1], r: 4.5 }));
          return group;
        }),
      );
      cursor.setAttribute("visibility", "visible");
      const place = at[2] ? `${data.x} ${at[2]}: ` : "";
      readout.textContent = place + found.map(([line, point]) => `${line.name} ${point[3]}`).join(", ");
      plot.setAttribute("aria-valuetext", readout.textContent);
      plot.setAttribute("aria-valuenow", index);
    };

    const hide = () => {
      cursor.setAttribute("visibility", "hidden");
      readout.textContent = "\u00a0";
      index = -1;
    };

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      show(nearest(guide, ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width));
    });
    svg.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const last = guide.length - 1;
      const big = Math.max(1, Math.round(guide.length / 10));
      const next = {
        ArrowRight: index + 1, ArrowUp: index + 1, ArrowLeft: index < 0 ? last : index - 1,
        ArrowDown: index < 0 ? last : index - 1, PageUp: index + big, PageDown: index - big, Home: 0, End: last,
      }[event.key];
      if (event.key === "Escape") hide();
      if (next === undefined) return;
      event.preventDefault();
      show(guide[Math.min(Math.max(next, 0), last)]);
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    const value = (row, column) => {
      const cell = row.cells[column];
      return cell.dataset.sort ?? cell.textContent;
    };
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const numbers = head.classList.contains("number");
        const before = head.getAttribute("aria-sort");
        const up = before ? before === "descending" : !numbers; // the largest numbers first, names from the beginning
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const [x, y] = [value(a, column), value(b, column)];
          const order = numbers ? (Number(x) || 0) - (Number(y) || 0) : x.localeCompare(y);
          return up ? order : -order;
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
})();
