"use strict";
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const rises = head.getAttribute("aria-sort") === "descending";
    const at = [...head.parentNode.children].indexOf(head);
    const key = (row) => row.children[at].dataset.value;
    const rows = [...body.rows].sort((a, b) => {
      const [left, right] = [key(a), key(b)];
      if (left === "" || right === "") return (left === "") - (right === "");
      const order = head.dataset.kind === "text" ? left.localeCompare(right) : Number(left) - Number(right);
      return rises ? order : -order;
    });
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", rises ? "ascending" : "descending");
    body.append(...rows);
  });
}
