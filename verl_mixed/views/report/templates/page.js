// Draws the charts of the page: those near the window first, the others when the browser is idle,
// and all again when the reader's system turns light or dark.
"use strict";
{
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const places = [...document.querySelectorAll(".chart")];
  const views = new Map(); // place -> promise of its view

  function draw(place) {
    if (!views.has(place)) {
      const css = getComputedStyle(document.documentElement);
      const [soft, line] = ["--soft", "--line"].map((name) => css.getPropertyValue(name).trim());
      const columns = Math.max(1, Math.floor(place.clientWidth / 150));
      const { axis, legend, ...look } = charts.shared.config;
      const specification = {
        ...charts.shared,
        ...charts.own[place.dataset.chart],
        title: undefined, // the page has a heading
        background: "transparent",
        config: {
          ...look,
          axis: { ...axis, labelColor: soft, gridColor: line },
          legend: { ...legend, labelColor: soft, columns },
        },
      };
      const options = {
        actions: false,
        ast: true, // expressions are interpreted: the policy of the page forbids eval
        defaultStyle: false,
        logLevel: 1, // errors: a legend that leaves out names is no reason for a warning
        renderer: "canvas", // a chart can have thousands of points to hover over
        tooltip: { theme: dark.matches ? "dark" : "light" },
      };
      views.set(place, vegaEmbed(place, specification, options).then(({ view }) => view));
    }
    return views.get(place);
  }

  async function drawAll() {
    for (const place of places) {
      await draw(place);
      await new Promise((done) => requestIdleCallback(done));
    }
  }

  const nearWindow = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => draw(target)),
    { rootMargin: "50%" },
  );
  for (const place of places) nearWindow.observe(place);
  let drawn = drawAll();
  dark.addEventListener("change", () => {
    drawn = drawn.then(async () => {
      for (const view of views.values()) (await view).finalize();
      views.clear();
      await drawAll();
    });
  });
  window.report = { draw, get drawn() { return drawn; } }; // for tests, and for the curious
}
