// The index of the atlas: rows are filtered by words, and sorted by the heads of columns. Without this the table stands as it is.
for (const table of document.querySelectorAll("table[data-sorts]")) {
  const rows = [...table.tBodies[0].rows];
  const text = (row, column) => row.cells[column].textContent.trim();
  const number = (value) => (/^[\d.]/.test(value) ? parseFloat(value) : value.startsWith("yes") ? 101 : NaN);
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const words = column === 0 || !rows.some((row) => !Number.isNaN(number(text(row, column))));
      rows.sort((one, two) => {
        const [a, b] = [text(one, column), text(two, column)];
        if (words) return -sign * a.localeCompare(b, "en", { numeric: true });
        const [x, y] = [number(a), number(b)];
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return sign * (x - y);
      });
      table.tBodies[0].append(...rows);
    });
  });
  for (const box of document.querySelectorAll(`[data-filters="${table.id}"]`)) {
    box.closest("[hidden]")?.removeAttribute("hidden");
    box.addEventListener("input", () => {
      const wanted = box.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const told = row.textContent.toLowerCase();
        row.hidden = !wanted.every((word) => told.includes(word));
      }
    });
  }
}
