"""How readable the texts of a page are, measured in a browser.

By WCAG 2.2, section 1.4.3: a text and what is behind it differ by at least 4.5, large
text by 3. https://www.w3.org/TR/WCAG22/#contrast-minimum
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Backgrounds that are half transparent are mixed with what is behind them.
_POOR = """() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (front, back) =>
    [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3]));
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const own = parse(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((c) => {
      const part = c / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const poor = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (["STYLE", "SCRIPT"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), back = behind(element);
    const front = over(parse(style.color), back);
    const [low, high] = [luminance(front), luminance(back)].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize), bold = style.fontWeight >= 700;
    const least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < least) {
      poor.set(`${style.color} on ${back.map(Math.round)}: ${ratio.toFixed(2)}`,
               walker.currentNode.data.trim().slice(0, 40));
    }
  }
  return [...poor].map(([colors, text]) => `${colors} ("${text}")`);
}"""


def poor(page: "Page") -> list[str]:
    """Texts that differ too little from their background, once for each colour."""
    return page.evaluate(_POOR)
