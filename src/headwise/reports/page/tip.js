// The tooltip: one element, for the mouse and for the keyboard alike.

const tip = document.getElementById("tip");
let tipOwner = null; // the element that the tip speaks of, and how to find the tip's place again

/** Shows what is known of a head's value; owner is the element it belongs to, x and y the pointer (or nothing). */
function showTip(at, owner, x = null, y = null) {
  const of = measure();
  const found = stat(of, at);
  const lines = [element("strong", {}, place(at))];
  if (found.mean === null) {
    lines.push(element("div", {}, `${of.label}: ${why(of, at)}`));
  } else {
    lines.push(element("div", {class: "value"}, `${of.label} ${short(found.mean)}${unit(of)}`));
    lines.push(element("div", {class: "exact dim"}, `exactly ${found.mean}`));
    const rows = state.rows === "special" ? "special-token rows" : "rows";
    lines.push(element("div", {class: "std"}, `std ${short(found.std)} over ${whole(found.rows)} ${rows}`));
  }
  lines.push(element("div", {class: "dim path"}, moduleName(heads[at].site)));
  tip.replaceChildren(...lines);
  tip.hidden = false;
  tipOwner = {owner, x, y};
  placeTip();
}

/** Beside the pointer, or at the corner of the owner; inside the window. */
function placeTip() {
  const {owner, x: left, y: top} = tipOwner;
  const corner = owner.getBoundingClientRect();
  const x = left ?? corner.right - 8;
  const y = top ?? corner.bottom - 8;
  const {width, height} = tip.getBoundingClientRect();
  const right = x + 14 + width > window.innerWidth ? x - width - 14 : x + 14;
  const below = y + 14 + height > window.innerHeight ? y - height - 14 : y + 14;
  tip.style.left = `${Math.max(8, Math.min(right, window.innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, below)}px`;
}

function hideTip() {
  tip.hidden = true;
  tipOwner = null;
}

/** After scrolling, the tip goes with a focused cell, and stays at the pointer only while its owner does. */
function keepTip() {
  if (!tipOwner) return;
  const {owner, x, y} = tipOwner;
  if (x === null) placeTip();
  else if (!owner.contains(document.elementFromPoint(x, y))) hideTip();
}

document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", keepTip, {passive: true, capture: true});
