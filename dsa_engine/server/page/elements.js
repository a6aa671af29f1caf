/** The page's elements, and words to screen readers. */

export const $ = (id) => document.getElementById(id);

/** Tells a screen reader, once what it reads now has ended. */
export function say(text) {
  $("status").textContent = text;
}

export function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

export function make(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}
