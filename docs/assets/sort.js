// Tables with class "sortable": a click on a column's title sorts by it, numbers from the highest; a second one turns it round.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sorts";
      button.textContent = "↕";
      button.setAttribute("aria-label", `Sort by ${head.textContent}`);
      head.append(" ", button);
      head.addEventListener("click", (event) => {
        if (event.target.closest("a")) return;
        const value = (row) => {
          const text = row.cells[column].textContent.replaceAll(",", "").trim();
          return { text, number: parseFloat(text) };
        };
        const numeric = [...body.rows].some((row) => !Number.isNaN(value(row).number));
        const down = head.ariaSort ? head.ariaSort !== "descending" : numeric;
        for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
        head.ariaSort = down ? "descending" : "ascending";
        const rows = [...body.rows].sort((one, two) => {
          const [a, b] = [value(one), value(two)];
          if (!numeric) return (down ? -1 : 1) * a.text.localeCompare(b.text);
          if (Number.isNaN(a.number) || Number.isNaN(b.number)) return Number.isNaN(a.number) - Number.isNaN(b.number);
          return down ? b.number - a.number : a.number - b.number;
        });
        body.append(...rows);
      });
    });
  }
  const show = () => {
    const place = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const around = place && place.closest("details");
    if (around) { around.open = true; place.scrollIntoView(); }
  };
  addEventListener("hashchange", show);
  show();
});
