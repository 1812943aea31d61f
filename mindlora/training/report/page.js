"use strict";
// Shows the values of a chart at the step under the mouse or finger. Everything else works without it.
function showValues(root) {
  for (const figure of root.querySelectorAll("figure:has(> script)")) {
    const svg = figure.querySelector("svg.chart");
    const data = JSON.parse(figure.querySelector("script").textContent);
    const hover = svg.querySelector(".hover");
    const readout = figure.querySelector(".readout");
    const note = readout.textContent;
    const { width } = svg.viewBox.baseVal;
    const [left, right] = [{{ left }}, width - {{ right }}];

    const nearest = (steps, step) => {
      let [low, high] = [0, steps.length - 1];
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (steps[middle] <= step) low = middle; else high = middle;
      }
      return step - steps[low] <= steps[high] - step ? low : high;
    };

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = Math.min(right, Math.max(left, ((event.clientX - box.left) / box.width) * width));
      const step = data.x[0] + ((x - left) / (right - left)) * (data.x[1] - data.x[0]);
      hover.setAttribute("transform", `translate(${x} 0)`);
      hover.setAttribute("visibility", "visible");
      readout.textContent = data.lines.map((line) => {
        const index = nearest(line.steps, step);
        const name = data.lines.length > 1 ? `${line.label}: ` : "";
        return `${name}${line.values[index].toLocaleString("en", { maximumSignificantDigits: 5 })} at step ${line.steps[index].toLocaleString("en")}`;
      }).join(" · ");
    });
    svg.addEventListener("pointerleave", () => {
      hover.setAttribute("visibility", "hidden");
      readout.textContent = note;
    });
  }
}

showValues(document);
