"use strict";
// What a dataset's card does: enlarge a picture, search for a class, copy the command. Names are only ever set as text.

const one = (selector, root = document) => root.querySelector(selector);
const MOST_SHOWN = 100;
const MOST_AT_REST = 40;

function enlarging(dialog, tiles) {
  let current = 0;
  const show = (number) => {
    current = (number + tiles.length) % tiles.length;
    const facts = tiles[current].nextElementSibling.cloneNode(true);
    facts.hidden = false;
    one("div", dialog).replaceChildren(one("img", tiles[current]).cloneNode(), facts);
    one("output", dialog).textContent = `${current + 1} of ${tiles.length}`;
  };
  tiles.forEach((tile, number) => {
    tile.disabled = false;
    tile.addEventListener("click", () => {
      show(number);
      dialog.showModal();
    });
  });
  one(".previous", dialog).addEventListener("click", () => show(current - 1));
  one(".next", dialog).addEventListener("click", () => show(current + 1));
  one(".close", dialog).addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") show(current - 1);
    if (event.key === "ArrowRight") show(current + 1);
  });
  dialog.addEventListener("close", () => tiles[current].focus());
}

function rowOf({ label, count, name }, most) {
  const row = document.createElement("tr");
  const head = document.createElement("th");
  const bar = document.createElement("td");
  const number = document.createElement("td");
  head.scope = "row";
  head.title = `label ${label}`;
  head.append(document.createElement("bdi"));
  head.firstChild.textContent = name;
  bar.append(document.createElement("i"));
  bar.firstChild.style.width = `${(100 * count) / most}%`;
  number.className = "count";
  number.textContent = count.toLocaleString("en");
  row.append(head, bar, number);
  return row;
}

function searching(input, listed) {
  const classes = listed.split("\n").map((line) => {
    const [label, count, name] = line.split("\t");
    return { label, count: Number(count), name, lower: name.toLowerCase() };
  });
  const most = Math.max(1, classes[0].count);
  const said = one("#classes-found");
  const all = said.textContent;
  one("#class-search").hidden = false;
  input.addEventListener("input", () => {
    const asked = input.value.trim().toLowerCase();
    const found = classes.filter(({ label, lower }) => lower.includes(asked) || label === asked);
    const shown = asked ? found.slice(0, MOST_SHOWN) : classes.length > MOST_AT_REST ? [] : classes;
    one("#class-rows").replaceChildren(...shown.map((item) => rowOf(item, most)));
    const first = shown.length < found.length ? `, the ${shown.length} largest shown` : "";
    said.textContent = asked ? `${found.length.toLocaleString("en")} of ${all}${first}` : all;
  });
}

function copying(button, code) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected"; // the page may not write to the clipboard; the keyboard may
    }
  });
}

if (one("#enlarged")) enlarging(one("#enlarged"), [...document.querySelectorAll(".tile")]);
if (one("#class-search")) searching(one("#class-search input"), one("#class-list").textContent);
for (const sheet of document.querySelectorAll(".command")) copying(sheet.querySelector("button"), sheet.querySelector("code"));
