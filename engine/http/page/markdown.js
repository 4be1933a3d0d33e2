// Markdown as models write it, into elements: headings, lists, quotes, fences, tables, rules; emphasis, code, links.
//
// Text only ever becomes text nodes, so HTML in it stays text, and a link leads to the web or to a mail address or is
// none. A picture is a link: loading it would say that it was looked at. An answer is shown again with every frame, so
// a frame costs what its last block does (`Markdown`), and nothing here is more than linear in its text.

const MOST_RICH = 20_000; // characters of a paragraph; a longer one is shown as it was written
const DEEPEST = 12; // lists, quotes or emphasis within each other; what is deeper is text

const FENCE = /^([ \t]*)(`{3,}|~{3,}(?!~))([^`]*)$/; // with another backtick it is code in a line
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^[ \t]*(?:[-*+]|(\d{1,9})[.)])(?:[ \t]+|$)/;
const ITEM_IN_TEXT = /^[ \t]*(?:[-*+]|1[.)])[ \t]/; // no other number: years stand at the beginnings of lines too
const UNDER_HEAD = /^\|?(?: *:?-+:? *\|)+(?: *:?-+:?)?$/; // the second line of a table

const isBlank = (line) => line.trim() === "";
const indent = (line) => /^[ \t]*/.exec(line)[0].replaceAll("\t", "    ").length;

function dedent(line, columns) {
  let at = 0;
  while (columns > 0 && (line[at] === " " || line[at] === "\t")) columns -= line[at++] === "\t" ? 4 : 1;
  return line.slice(at);
}

/** What begins with this line, or, `inText`, ends a paragraph; undefined for plain text. */
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

/** Lines → blocks, each with a `kind`, its first `line`, and its `text` or its `children`. */
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

/** The first line from `at` on for which this does not hold. */
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

/** A list ends at the first line that stands no further in than its marks and is neither an item nor plain text. */
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
    /\\([!-/:-@[-`{-~])/, // an escape
    /(`+)/,
    /!?\[([^[\]]*)\]\(<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?: +"[^"]*")?\)/, // [label](address "title")
    // An address as it stands in a sentence: its parentheses are closed, and its last character is no punctuation.
    /(https?:\/\/(?:[^\s<>()]|\([^\s<>()]*\))*(?:[^\s<>().,;:!?'"*_~`\]]|\([^\s<>()]*\)))/,
    /(\*\*|__|~~|\*|_)/,
  ].map((part) => part.source).join("|"),
  "g",
);
const EMPHASIS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/** The text of one block as nodes. */
function inline(text, isLabel = false) {
  const root = document.createDocumentFragment();
  const open = []; // emphasis without its end so far: {mark, node}
  const marks = new RegExp(MARK);
  const put = (node) => node !== "" && (open.at(-1)?.node ?? root).append(node);
  let done = 0;
  for (let found; (found = marks.exec(text)); done = marks.lastIndex) {
    const [whole, escaped, ticks, label, address, bare, mark] = found;
    put(text.slice(done, found.index));
    if (escaped) put(escaped);
    else if (ticks) marks.lastIndex = putCode(put, text, marks.lastIndex, ticks);
    else if (address) put(isLabel ? whole : link(inline(label || address, true), address, whole));
    else if (mark) marks.lastIndex = emphasize(open, put, text, found.index, mark);
    else put(bare && !isLabel ? link(bare, bare, bare) : whole);
  }
  put(text.slice(done));
  for (const { mark, node } of open.reverse()) node.replaceWith(mark, ...node.childNodes);
  return root;
}

/** Between two runs of as many backticks; where there is no second, they are text. Returns where it ends. */
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

/** Open, close or keep as text. Returns where the mark ends: of three, the inner one is closed alone. */
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

/** A link to the web or a mail address; what leads elsewhere is shown as it was written. */
function link(label, address, written) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return written;
  const element = make("a", "", label);
  Object.assign(element, { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" });
  return element;
}

/** What an element must be of to show a block. */
const kindOf = ({ kind, info, start }) => `${kind} ${info ?? start ?? ""}`;

/** The element of a block; `body` is where its text or its children go. */
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
  scroll.tabIndex = 0; // so that the keyboard can move what is wider than its box
  scroll.setAttribute("aria-label", info ? `Code, ${info}` : "Code");
  scroll.setAttribute("role", "region");
  return make("div", "code", make("div", "row", make("span", "", info), copyButton(() => body.textContent)), scroll);
}

/** Make a parent's elements from the `from`th on those of the blocks, leaving alone those that are so already. */
function showBlocks(parent, blocks, from = 0) {
  let next = parent.children[from]; // and its siblings: looking up each by its number would be quadratic
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

/** Text that mostly grows, in one text node. */
function showPlain(box, text) {
  const node = box.firstChild;
  if (box.childNodes.length !== 1 || !text.startsWith(node.data)) box.textContent = text;
  else if (text.length > node.length) node.appendData(text.slice(node.length));
}

/** A box that shows a text which only grows. Blocks before the last one never change again, and are not read again. */
class Markdown {
  constructor(box) {
    this.box = box;
    this.start = 0; // of the block from which on it is read again: in the text, and among the elements
    this.count = 0;
  }

  show(text) {
    const lines = text.slice(this.start).split("\n");
    const blocks = readBlocks(lines);
    showBlocks(this.box, blocks, this.count);
    // What a block is, its first two lines say, and the last line may still turn out to be another.
    const last = blocks.findLastIndex((block) => block.line < lines.length - 2);
    if (last <= 0) return;
    this.count += last;
    for (const line of lines.slice(0, blocks[last].line)) this.start += line.length + 1;
  }
}
