"use strict";
// Asks for the page again and again, and shows what has come. Where the reader is, and what is unfolded, stays.
let tag = "";

async function look() {
  const state = document.getElementById("live");
  try {
    const response = await fetch("/", { headers: { "If-None-Match": tag }, cache: "no-store" });
    if (response.ok) {
      tag = response.headers.get("ETag");
      show(new DOMParser().parseFromString(await response.text(), "text/html").querySelector("main"));
    }
    state.textContent = response.ok || response.status === 304 ? "" : await response.text();
  } catch (error) {
    state.textContent = `This page is no longer kept up to date: ${error.message}. Run mindlora report --live again.`;
  }
}

function show(main) {
  const before = document.querySelector("main");
  const unfolded = [...before.querySelectorAll("details")].map((details) => details.open);
  [...main.querySelectorAll("details")].forEach((details, index) => { details.open = unfolded[index] ?? details.open; });
  before.replaceWith(main);
  showValues(main);
}

(async () => {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 2000));
    if (!document.hidden) await look();
  }
})();
