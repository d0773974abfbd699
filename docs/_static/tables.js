// Each cell knows the head of its column, for phones, where the rows of a table are cards. Words break only in a
// table that is wider than its box without breaks, or that is folded, so that its width is not known.
for (const table of document.querySelectorAll("table.docutils")) {
  table.classList.add("cards");
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr"))
    [...row.cells].forEach((cell, index) => heads[index] && (cell.dataset.head = heads[index]));
  if (table.closest("details") || table.offsetWidth > table.parentElement.clientWidth) table.classList.add("tight");
}
