"use strict";

/* Marks the boxes whose content is wider than they are: the style says there that they can be scrolled. */
(() => {
  const mark = (box) => box.classList.toggle("wider", box.scrollWidth > box.clientWidth + 1);
  const sizes = new ResizeObserver((entries) =>
    new Set(entries.map(({ target }) => target.closest(".scroll"))).forEach(mark));
  for (const box of document.querySelectorAll(".scroll")) {
    sizes.observe(box);
    for (const child of box.children) sizes.observe(child);
  }
})();
