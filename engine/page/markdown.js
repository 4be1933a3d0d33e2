// A Markdown renderer for answers of models: headings, lists, quotes, fences, tables, rules; emphasis, code, links.
// Formulas of LaTeX stay as they are written, with their delimiters, so that they can be copied.
//
// Text becomes only text nodes, so HTML in it stays text, and links lead only to the web or to mail addresses. A picture
// becomes a link, since loading it would reveal that it was viewed. An answer is rendered again with every frame, so
// a frame renders only its last block (`Markdown`), and all algorithms take linear time.

const MOST_RICH = 20_000; // characters of a paragraph; longer ones are shown as plain text
const DEEPEST = 12; // nesting of lists, quotes and emphasis; deeper levels are shown as text

const FENCE = /^([ \t]*)(`{3,}|~{3,}(?!~))([^`]*)$/; // a further backtick makes it inline code
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^[ \t]*(?:[-*+]|(\d{1,9})[.)])(?:[ \t]+|$)/;
const ITEM_IN_TEXT = /^[ \t]*(?:[-*+]|1[.)])[ \t]/; // only the number 1: lines of text may start with a year
const UNDER_HEAD = /^\|?(?: *:?-+:? *\|)+(?: *:?-+:?)?$/; // the second line of a table

const isBlank = (line) => line.trim() === "";
const indent = (line) => /^[ \t]*/.exec(line)[0].replaceAll("\t", "    ").length;

function dedent(line, columns) {
  let at = 0;
  while (columns > 0 && (line[at] === " " || line[at] === "\t")) columns -= line[at++] === "\t" ? 4 : 1;
  return line.slice(at);
}

/** Return the kind of block that starts with this line (or, if `inText`, ends a paragraph); undefined for plain text. */
function blockAt(lines, at, depth, inText = false) {
  const line = lines[at];
  if (FENCE.test(line)) return readFence;
  if (HEADING.test(line)) return readHeading;
  if (RULE.test(line)) return readRule;
  if (line.includes("|") && UNDER_HEAD.test((lines[at + 1] ?? "").trim())) return readTable;
  if (depth < DEEPEST && QUOTE.test(line)) return readQuote;
  if (depth < DEEPEST && (inText ? ITEM_IN_TEXT : ITEM).test(line)) return readList;
  return undefined;
}

/** Parse lines into blocks, each with a `kind`, its first `line`, and its `text` or its `children`. */
function readBlocks(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) at++;
    else {
      const [block, end] = (blockAt(lines, at, depth) ?? readParagraph)(lines, at, depth);
      blocks.push({ ...block, line: at });
      at = end;
    }
  }
  return blocks;
}

/** Return the first line from `at` on that does not satisfy the predicate. */
function endOf(lines, at, holds) {
  while (at < lines.length && holds(lines[at], at)) at++;
  return at;
}

function readParagraph(lines, at, depth) {
  const end = endOf(lines, at + 1, (line, i) => !isBlank(line) && !blockAt(lines, i, depth, true));
  return [{ kind: "p", text: lines.slice(at, end).join("\n") }, end];
}

function readFence(lines, at) {
  const [, margin, mark, info] = FENCE.exec(lines[at]);
  const isClosing = (line) => line.length >= mark.length && line === mark[0].repeat(line.length);
  const end = endOf(lines, at + 1, (line) => !isClosing(line.trim()));
  const code = lines.slice(at + 1, end).map((line) => dedent(line, indent(margin)));
  return [{ kind: "code", info: info.trim(), text: code.join("\n") }, end + 1];
}

function readHeading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]);
  return [{ kind: `h${Math.min(marks.length + 2, 6)}`, text: text.replace(/ #+ *$/, "") }, at + 1];
}

const readRule = (lines, at) => [{ kind: "hr", text: "" }, at + 1];

function readQuote(lines, at, depth) {
  const end = endOf(lines, at, (line) => QUOTE.test(line));
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ kind: "blockquote", children: readBlocks(inner, depth + 1) }, end];
}

function readTable(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const row = (line, kind) => {
    const cells = line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);
    return { kind: "tr", children: cells.map((cell) => ({ kind, text: cell.trim().replaceAll("\\|", "|") })) };
  };
  const rows = [row(lines[at], "th"), ...lines.slice(at + 2, end).map((line) => row(line, "td"))];
  return [{ kind: "table", children: rows }, end];
}

/** Read a list. It ends at a line that is not indented beyond its markers and is neither an item nor plain text. */
function readList(lines, at, depth) {
  const margin = indent(lines[at]);
  const first = ITEM.exec(lines[at])[1];
  const children = [];
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || RULE.test(lines[at]) || (found[1] === undefined) !== (first === undefined)) break;
    if (indent(lines[at]) > margin + 1) break;
    const inner = [lines[at].slice(found[0].length)];
    for (at++; at < lines.length; at++) {
      const line = lines[at];
      const isIn = isBlank(line) || indent(line) > margin + 1;
      if (!isIn && (isBlank(inner.at(-1)) || blockAt(lines, at, depth))) break;
      inner.push(dedent(line, found[0].length));
    }
    children.push({ kind: "li", children: readBlocks(inner, depth + 1) });
  }
  return [first === undefined ? { kind: "ul", children } : { kind: "ol", start: Number(first), children }, at];
}

const MARK = new RegExp(
  [
    /(\\[([]|\$\$)/, // the start of a formula
    /\\([!-/:-@[-`{-~])/, // an escape
    /(`+)/,
    /!?\[([^[\]]*)\]\(<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?: +"[^"]*")?\)/, // [label](address "title")
    // A bare address in a sentence: its parentheses are balanced, and its last character is no punctuation.
    /(https?:\/\/(?:[^\s<>()]|\([^\s<>()]*\))*(?:[^\s<>().,;:!?'"*_~`\]]|\([^\s<>()]*\)))/,
    /(\*\*|__|~~|\*|_)/,
  ].map((part) => part.source).join("|"),
  "g",
);
const MATH_END = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };
const EMPHASIS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/** Render the text of one block as nodes. */
function inline(text, isLabel = false) {
  const root = document.createDocumentFragment();
  const open = []; // emphasis that is still open: {mark, node}
  const marks = new RegExp(MARK);
  const put = (node) => node !== "" && (open.at(-1)?.node ?? root).append(node);
  let done = 0;
  for (let found; (found = marks.exec(text)); done = marks.lastIndex) {
    const [whole, math, escaped, ticks, label, address, bare, mark] = found;
    put(text.slice(done, found.index));
    if (math) marks.lastIndex = putMath(put, text, found.index, math);
    else if (escaped) put(escaped);
    else if (ticks) marks.lastIndex = putCode(put, text, marks.lastIndex, ticks);
    else if (address) put(isLabel ? whole : link(inline(label || address, true), address, whole));
    else if (mark) marks.lastIndex = emphasize(open, put, text, found.index, mark);
    else put(bare && !isLabel ? link(bare, bare, bare) : whole);
  }
  put(text.slice(done));
  for (const { mark, node } of open.reverse()) node.replaceWith(mark, ...node.childNodes);
  return root;
}

/** Put a formula with its delimiters, or the first one if the other is missing; return its end. */
function putMath(put, text, at, mark) {
  const end = text.indexOf(MATH_END[mark], at + 2);
  put(end < 0 ? mark : text.slice(at, end + 2));
  return (end < 0 ? at : end) + 2;
}

/** Read inline code between two equal runs of backticks, or the first as text if unmatched; return its end. */
function putCode(put, text, from, ticks) {
  let end = text.indexOf(ticks, from);
  while (end >= 0 && (text[end - 1] === "`" || text[end + ticks.length] === "`")) end = text.indexOf(ticks, end + 1);
  if (end < 0) {
    put(ticks);
    return from;
  }
  const code = text.slice(from, end);
  put(make("code", "", code.startsWith(" ") && code.endsWith(" ") && !isBlank(code) ? code.slice(1, -1) : code));
  return end + ticks.length;
}

/** Open or close emphasis, or keep the mark as text; return its end. Of three marks, the inner one closes alone. */
function emphasize(open, put, text, at, mark) {
  const isWord = (char) => /[\p{L}\p{N}]/u.test(char ?? "");
  if (open.at(-1)?.mark === mark[0] && text[at + 2] === mark[0]) mark = mark[0];
  const end = at + mark.length;
  const [before, after] = [text[at - 1] ?? " ", text[end] ?? " "];
  const isInWord = mark[0] === "_" && isWord(before) && isWord(after); // snake_case
  const from = open.findLastIndex((each) => each.mark === mark);
  if (from >= 0 && !isBlank(before) && !isInWord) {
    for (const { mark: alone, node } of open.splice(from + 1).reverse()) node.replaceWith(alone, ...node.childNodes);
    open.pop();
  } else if (!isBlank(after) && !isInWord && open.length < DEEPEST) {
    const node = make(EMPHASIS[mark]);
    put(node);
    open.push({ mark, node });
  } else put(mark);
  return end;
}

/** Create a link to the web or a mail address; other targets are shown as text. */
function link(label, address, written) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return written;
  const element = make("a", "", label);
  Object.assign(element, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" });
  return element;
}

/** Return a key of a block; an element made for the same key can show the block. */
const kindOf = ({ kind, info, start }) => `${kind} ${info ?? start ?? ""}`;

/** Create the element of a block; `body` is the container of its text or children. */
function elementOf(block) {
  const { kind, info, start } = block;
  const body = make(kind);
  if (kind === "ol") body.start = start;
  if (kind === "th") body.scope = "col";
  const node = kind === "code" ? codeBox(info, body) : kind === "table" ? make("div", "table", body) : body;
  return Object.assign(node, { kind: kindOf(block), body });
}

function codeBox(info, body) {
  const scroll = make("pre", "", body);
  scroll.tabIndex = 0; // lets the keyboard scroll wide content
  scroll.setAttribute("aria-label", info ? `Code, ${info}` : "Code");
  scroll.setAttribute("role", "region");
  return make("div", "code", make("div", "row", make("span", "", info), copyButton(() => body.textContent)), scroll);
}

/** Update a parent's elements from index `from` on to show the blocks, keeping elements that match already. */
function showBlocks(parent, blocks, from = 0) {
  let next = parent.children[from]; // then its siblings: access by index would be quadratic
  for (const block of blocks) {
    let node = next;
    next = node?.nextElementSibling;
    if (node?.kind !== kindOf(block)) {
      const fresh = elementOf(block);
      if (node) node.replaceWith(fresh);
      else parent.append(fresh);
      node = fresh;
    }
    if (block.children) showBlocks(node.body, block.children);
    else if (block.kind === "code" || block.text.length > MOST_RICH) showPlain(node.body, block.text);
    else if (node.text !== block.text) node.body.replaceChildren(inline(block.text));
    node.text = block.text;
  }
  for (let node = next; node; node = next) {
    next = node.nextElementSibling;
    node.remove();
  }
}

/** Set the text of one text node, which mostly grows. */
function showPlain(box, text) {
  const node = box.firstChild;
  if (box.childNodes.length !== 1 || !text.startsWith(node.data)) box.textContent = text;
  else if (text.length > node.length) node.appendData(text.slice(node.length));
}

/** A box that shows a growing text. Blocks before the last one no longer change and are not parsed again. */
class Markdown {
  constructor(box) {
    this.box = box;
    this.start = 0; // offset of the first block that is parsed again
    this.count = 0;
  }

  show(text) {
    const lines = text.slice(this.start).split("\n");
    const blocks = readBlocks(lines);
    showBlocks(this.box, blocks, this.count);
    // The first two lines of a block determine its kind, and the last line is still incomplete.
    const last = blocks.findLastIndex((block) => block.line < lines.length - 2);
    if (last <= 0) return;
    this.count += last;
    for (const line of lines.slice(0, blocks[last].line)) this.start += line.length + 1;
  }
}
