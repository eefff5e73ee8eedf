// The tooltip: one element, for the mouse and for the keyboard alike.

const tip = document.getElementById("tip");

/** Shows what is known of a head's value at a point of the window. */
function showTip(at, x, y) {
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
  const {width, height} = tip.getBoundingClientRect();
  const left = x + 14 + width > window.innerWidth ? x - width - 14 : x + 14;
  const top = y + 14 + height > window.innerHeight ? y - height - 14 : y + 14;
  tip.style.left = `${Math.max(8, Math.min(left, window.innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

const hideTip = () => { tip.hidden = true; };

document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", hideTip, {passive: true, capture: true});
