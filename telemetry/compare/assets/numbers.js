// Numbers as text and the places of ticks, for page.js.
"use strict";
function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e15) return value.toExponential(2).replace("+", "");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return trim((value / (letter === "k" ? 1e3 : unit)).toPrecision(4)) + letter;
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return trim(value.toPrecision(5));
}
const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= raw * 0.999) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}
function logTicks(low, high) {
  const found = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 6)), inner = last - first <= 2 ? [1, 2, 5] : [1];
  for (let power = first; power <= last; power += every)
    for (const one of inner) if (one * 10 ** power >= low * 0.999 && one * 10 ** power <= high * 1.001) found.push(one * 10 ** power);
  return found.length >= 2 ? found : [low, high];
}
