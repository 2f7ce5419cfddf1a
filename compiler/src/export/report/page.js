"use strict";
// Shows at once what the browser would show after a while: the title of the shape that is pointed at.
const hint = document.getElementById("hint");
const shapes = new WeakMap();
document.addEventListener("pointermove", (event) => {
  const shape = event.target.closest ? event.target.closest("svg rect, svg circle") : null;
  if (!shape) { hint.hidden = true; return; }
  if (!shapes.has(shape)) {
    const title = shape.querySelector("title");
    shapes.set(shape, title ? title.textContent : "");
    if (title) { shape.setAttribute("aria-label", title.textContent); title.remove(); }
  }
  const text = shapes.get(shape);
  hint.hidden = text === "";
  hint.textContent = text;
  const room = document.documentElement.clientWidth - hint.offsetWidth - 8;
  hint.style.left = Math.max(8, Math.min(event.clientX + 14, room)) + "px";
  const below = event.clientY + 18;
  const over = event.clientY - hint.offsetHeight - 12;
  hint.style.top = (below + hint.offsetHeight > window.innerHeight ? over : below) + "px";
});
document.addEventListener("pointerleave", () => { hint.hidden = true; });
