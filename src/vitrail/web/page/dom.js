// Elements, built without markup: text from files and models is never read as HTML.

/** Return an element with properties, attributes (names with a dash, role, for) and children. */
export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  set(made, props);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Replace the children of an element; null stands for none. */
export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null));
}

const SVG = "http://www.w3.org/2000/svg";

/** Return an SVG element. */
export function s(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

function set(made, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || ["role", "for"].includes(name)) made.setAttribute(name, value);
    else if (name === "class") made.className = value;
    else made[name] = value;
  }
}

/** Return a labeled choice of one of several values, [value, text] each. */
export function choice(label, options, value, onchange, props = {}) {
  const select = h("select", { onchange: () => onchange(select.value), ...props });
  fillChoice(select, options, value);
  return h("label", { class: "field" }, h("span", {}, label), select);
}

export function fillChoice(select, options, value) {
  const same = select.options.length === options.length && options.every(([one], at) => select.options[at].value === String(one));
  if (!same) select.replaceChildren(...options.map(([one, text]) => h("option", { value: one }, text)));
  select.value = value;
  select.disabled = options.length < 2;
}

/** Return a labeled slider over positions 0 to `last`; `text` says what a position means. */
export function slider(label, last, position, text, oninput, props = {}) {
  const output = h("span", { class: "value" }); // no <output>: a label would name that instead of the slider
  const input = h("input", {
    type: "range", min: 0, max: last, step: 1,
    oninput: () => {
      show();
      oninput(Number(input.value));
    },
    ...props,
  });
  const show = () => {
    output.textContent = text(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
    input.style.setProperty("--at", `${(100 * input.value) / Math.max(1, input.max)}%`);
  };
  const field = h("label", { class: "field slider" }, h("span", {}, label, " ", output), input);
  input.value = position;
  show();
  return Object.assign(field, {
    move(to, newLast = input.max) {
      input.max = newLast;
      input.value = to;
      show();
    },
    input,
  });
}

/** Return a row of buttons of which one is pressed. */
export function pills(label, options, value, onchange) {
  const group = h("div", { class: "pills", role: "radiogroup", "aria-label": label });
  const buttons = options.map(([one, text]) =>
    h("button", { type: "button", role: "radio", onclick: () => choose(one), "data-value": one }, text),
  );
  const mark = (now) => {
    for (const button of buttons) {
      const on = button.dataset.value === now;
      button.setAttribute("aria-checked", on);
      button.tabIndex = on ? 0 : -1;
    }
  };
  const choose = (one) => {
    mark(one);
    onchange(one);
  };
  arrows(group, buttons, (button) => {
    button.focus();
    choose(button.dataset.value);
  });
  group.append(...buttons);
  mark(value);
  return Object.assign(group, { mark });
}

/** Move among buttons with the arrow keys, as radio buttons and tabs do. */
export function arrows(group, buttons, go) {
  group.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = buttons.indexOf(event.target);
    if (!move || at < 0) return;
    event.preventDefault();
    const shown = buttons.filter((button) => !button.hidden);
    go(shown[(shown.indexOf(buttons[at]) + move + shown.length) % shown.length]);
  });
}

export function card(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), ...children);
}

export function saveBlob(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const percent = (share) => `${(100 * share).toFixed(share > 0.999 || share < 0.001 ? 2 : 1)} %`;
/** Return a number with three digits, or all those in front of the point. */
export const short = (value) => (value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));
export const operations = (count) => (count < 1e8 ? `${short(count / 1e6)} M` : `${short(count / 1e9)} G`);
export const milliseconds = (seconds) => `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
