"""Shortens the text of mlfab.c: members of absent rooms go, and prototypes.

A member that only a room sets is 0 without the room. `without` deletes its declaration, takes its value as 0 in all expressions,
and deletes the functions that have no caller then. A wrong row shows: a use that stays fails to compile, and an assignment
must be of 0. `stated_once` deletes the prototypes of functions whose body stands before their first use.
"""
import collections
import functools
import re

SPACE = re.compile(r"(?:\s|/\*.*?\*/)*", re.S)
HIDDEN = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
WORD, LINE = re.compile(r"\w+"), re.compile(".+")
WIDTH = 100


@functools.lru_cache(maxsize=None)
def masked(text):
    """The text with its comments blank and its literals filled: of the same length."""
    return HIDDEN.sub(lambda m: '"' * len(m.group()) if m.group()[0] != "/" else LINE.sub(lambda line: " " * len(line.group()), m.group()), text)


def close(mask, at):
    """The position behind the bracket that closes the one at this position."""
    left, depth, end = mask[at], 0, at
    right = {"(": ")", "[": "]", "{": "}"}[left]
    while depth or end == at:
        begin, end = end, mask.index(right, end) + 1
        depth += mask.count(left, begin, end) - 1
    return end


def comment(text, at):
    """The begin of the comment in lines of its own before this position; the position itself if there is none."""
    begin = text.rfind("/*", 0, at)
    own = begin >= 0 and text[begin:at].find("*/") == at - begin - 3 and text[at - 1] == "\n" and text[begin - 1:begin] in ("", "\n")
    return begin if own else at


def split(text, pattern):
    """The pieces of an expression between the operators of this pattern that stand in no bracket."""
    mask, pieces, begin, at = masked(text), [], 0, 0
    while at < len(mask):
        if mask[at] in "([{":
            at = close(mask, at)
            continue
        match = pattern.match(mask, at)
        if match:
            pieces += [text[begin:at], match.group()]
            begin = at = match.end()
        else:
            at += 1
    return pieces + [text[begin:]]


ASSIGN = re.compile(r",|;|(?<![=!<>])[-+*/|&^%]?=(?!=)|\breturn\b|<<=|>>=")
OR, AND, ASK = re.compile(r"\|\|"), re.compile(r"&&"), re.compile(r"\?|(?<!\?):")
OPERATOR = re.compile(r"[+*/<|&]|-(?!>)|(?<!-)>")
COMMA = re.compile(",")
EQUAL = re.compile(r"[!=]=|(?<=\s)[<>](?=\s)")
CALL = re.compile(r"(?!(?:sizeof|offsetof|mlfab__min|mlfab__max)\()\b\w+\(")
KNOWN = {"0": 0, "0u": 0, "NULL": 0, "1": 1}


VARIABLE = re.compile(r"(?m)^([ \t]+(?!return\b|goto\b|else\b)(?:[a-z]\w* )+(?:[^;()\n]*, )?)\*?([a-z]\w*)(?:\[[^]]*\])?(?: =([^;]*))?;(?:[ \t]*/\*[^\n]*\*/)?(?=\n|\Z)")


class Unreachable(Exception):
    """A statement that calls by a table that is not there: it cannot run."""


class Room:
    """The names that are 0: members, and functions that return nothing else. Also functions that do nothing."""

    pure = {"sizeof", "assert", "MLFAB__UNLIKELY", "MLFAB__LIKELY", "MLFAB__COUNT", "UINT64_C", "mlfab__min", "mlfab__max"}

    def __init__(self, paths, constants=None, ends=(), never=()):
        plain = sorted(paths, key=len, reverse=True)
        calls = [name for name, value in (constants or {}).items() if value == "0"]
        called = [r"%s\([^()]*\)" % name for name in sorted(calls)]
        self.constants, self.dead_ends = constants or {}, set(never)
        self.named = re.compile(r"(?<![\w>.])(%s)\([^()]*\)" % ("|".join(sorted(set(self.constants) - set(calls))) or "(?!)"))
        members, names = [path for path in plain if ">" in path], [path for path in plain if ">" not in path]
        ways = [r"(?:\w+(?:\[[^][]*\])?(?:->|\.))*?(?:%s)(?!\w)" % "|".join(members)] * bool(members) + [name + r"(?!\w)" for name in names] + called
        self.path = re.compile(r"(?<![\w>.])(?:%s)" % ("|".join(ways) or "(?!)"))
        self.ends = set(ends)
        self.never = re.compile(r"(?<!\w)(?:%s)\(" % ("|".join(sorted(never)) or "(?!)"))
        self.any = re.compile(r"(?<!\w)(?:%s)(?!\w)" % (
            "|".join(members + [r"(?<![>.])" + name for name in names] + sorted({*self.constants, *ends, *never})) or "(?!)"))

    def function(self, text, was=None):
        """A function's body. Its variables that are 0 then go, and those that are only set."""
        was, text = was or text, self.body(text)
        for match in VARIABLE.finditer(text):
            first, name, value = match.groups()
            uses = [use for use in re.finditer(r"(?<![\w>.])%s\b" % name, masked(text)) if not match.start(2) <= use.start() < match.end()]
            left = text[:match.end(1)] + ";" + text[match.end():] if first.rstrip().endswith(",") else text[:match.start()] + text[match.end():].lstrip("\n")
            left = left.replace(match.group(1) + ";", match.group(1).rstrip(" ,") + ";", 1) if first.rstrip().endswith(",") else left
            if not uses and len(re.findall(r"(?<![\w>.])%s\b" % name, masked(was))) > 1 and not first.strip().startswith("return"):
                if value and set(re.findall(r"(\w+)\(", value)) - self.pure:
                    call = re.fullmatch(r"\s*(\w+\([^;]*\))(?: [!=]= 0)?", value)
                    if not call:
                        continue
                    left = text[:match.start()] + re.match(r"\s*", first).group() + call.group(1) + ";" + text[match.end():]
                return self.function(left, was)
            if value and value.strip() in ("0", "NULL") and not re.search(r"\b%s = (?:0|NULL)[;,]" % name, was) and not any(
                    re.match(r"\s*(?:[-+|&*/]?=(?!=)|\+\+|--|\[)", text[use.end():]) or re.search(r"(?:[^&]&|\+\+|--)$", text[:use.start()]) for use in uses):
                return type(self)([name], self.constants, self.ends, self.dead_ends).function(left, was)
        return text

    def fold(self, text):
        """An expression in which absent members are 0: its text, and its value if it is known."""
        if not self.any.search(masked(text)):
            return text, KNOWN.get(text.strip())
        pieces = split(text, ASSIGN)
        if len(pieces) > 1:
            return "".join(p if i % 2 else self.fold(p)[0] for i, p in enumerate(pieces)), None
        folded, value = self.ask(text)
        return text[:len(text) - len(text.lstrip())] + folded.lstrip(), value

    def ask(self, text):
        pieces = split(text, ASK)
        if len(pieces) > 1:
            depth, colon = 0, None
            for i in range(1, len(pieces), 2):
                depth += 1 if pieces[i] == "?" else -1
                if depth == 0:
                    colon = i
                    break
            assert pieces[1] == "?" and colon, text
            condition, value = self.either(pieces[0])
            yes, no = "".join(pieces[2:colon]), "".join(pieces[colon + 1:])
            if value is not None:
                lead = re.match(r"\s*", text).group()
                picked, value = self.fold(yes if value else no)
                return lead + picked.strip(), value
            try:
                yes, one = self.fold(yes)
            except Unreachable:
                return self.fold(no)
            try:
                no, other = self.fold(no)
            except Unreachable:
                return yes, one
            if one is not None and one == other and not CALL.search(masked(condition)):
                return str(one), one
            return "%s?%s:%s" % (condition, yes, no), None
        return self.either(text)

    def either(self, text, pattern=OR, stop=1):
        """Alternatives; with AND and 0: conditions that all hold."""
        pieces = split(text, pattern)
        if len(pieces) == 1:
            return self.either(text, AND, 0) if pattern is OR else self.compared(text)
        kept = []
        for piece in pieces[::2]:
            try:
                folded, value = self.either(piece, AND, 0) if pattern is OR else self.compared(piece)
            except Unreachable:
                if pattern is OR or not kept:
                    raise
                folded, value = "0", 0
            if value == stop:
                if any(CALL.search(masked(before)) for before in kept):
                    raise ValueError("a call stands before an absent member: %s" % text)
                return str(stop), stop
            if value is None:
                kept.append(folded)
        if not kept:
            return str(1 - stop), 1 - stop
        lead = re.match(r"\s*", text).group()
        kept[0] = lead + kept[0].lstrip()
        if len(kept) == 1:
            return kept[0].rstrip(), None
        return pieces[1].join(kept), None

    def compared(self, text):
        pieces = split(text, EQUAL)
        if len(pieces) == 3:
            (one, value), (other, least) = self.plain(pieces[0]), self.plain(pieces[2])
            if value is not None and least is not None:
                value = int({"==": value == least, "!=": value != least, "<": value < least, ">": value > least}[pieces[1]])
                return str(value), value
            if one.strip() == other.strip() and re.fullmatch(r"[A-Z_0-9]+", one.strip()) and pieces[1] in ("==", "!="):
                return str(int(pieces[1] == "==")), int(pieces[1] == "==")
            return one + pieces[1] + other, None
        return self.plain(text)

    def plain(self, text):
        text = self.named.sub(lambda match: self.constants[match.group(1)], text)
        strip = text.strip()
        if strip.startswith("!") and not split(strip, OPERATOR)[1:]:
            folded, value = self.plain(strip[1:])
            if value is not None:
                return str(1 - value), 1 - value
            return text[:text.index("!") + 1] + folded, None
        if self.path.fullmatch(strip):
            return "0", 0
        likely = re.match(r"MLFAB__(?:UN)?LIKELY\(", strip)
        if likely and close(masked(strip), likely.end() - 1) == len(strip):
            folded, value = self.fold(strip[likely.end():-1])
            return (str(value) if value is not None else likely.group() + folded + ")"), value
        if strip.startswith("(") and close(masked(strip), 0) == len(strip):
            folded, value = self.fold(strip[1:-1])
            if value is not None:
                return str(value), value
            one = not split(folded, re.compile(OPERATOR.pattern + "|[?=,]"))[1:]
            return text.replace(strip, folded.strip() if one else "(" + folded + ")"), None
        mask, out, at = masked(text), "", 0
        if self.never.search(mask):
            raise Unreachable(text)
        while at < len(mask):
            found = self.path.match(text, at) if mask[at] not in ' "' else None
            if found and (at == 0 or not re.match(r"[\w>.]", mask[at - 1])):
                if re.match(r"\s*(?:->|\.|\(|\[)", mask[found.end():]):
                    raise Unreachable(text)
                if re.search(r"(?<!&)&\s*\Z", mask[:at]):
                    raise ValueError("the address, or bits, of an absent member: %s" % text)
                out, at = out + "\0", found.end()
            elif mask[at] in "([{":
                end = close(mask, at)
                folded, value = self.fold(text[at + 1:end - 1])
                group = not re.search(r"[\w\])]$", out.rstrip()) or re.search(r"\breturn$", out)
                out += "\0" if value == 0 and group and mask[at] == "(" and text[at + 1:end - 1].strip() != "0" else text[at] + folded + text[end - 1]
                at = end
            else:
                out, at = out + text[at], at + 1
        for _ in range(3):
            out = re.sub(r"\s*[-+|]\s*\0(?!\s*[*<>=!])", "", out)
            out = re.sub(r"(?:(?<=[(,|+])|(?<==)(?<![=!<>]=)|\A)(\s*)\0\s*[+|]\s*", r"\1", out)
        out = out.replace("\0", "0")
        return out, KNOWN.get(out.strip())

    # ---- statements

    def body(self, text, switch=False):
        """The text of a function's body, or of several statements."""
        at, out = 0, ""
        mask = masked(text)
        while at < len(text):
            begin = SPACE.match(text, at).end()
            if begin == len(text):
                return out + text[at:]
            end = self.end(mask, begin)
            statement = text[begin:end]
            try:
                new = self.statement(statement) if self.any.search(masked(statement)) else statement
            except Unreachable:
                if not switch:
                    raise
                new = None
            if new is None:
                lead = text[at:begin]
                # Its own comment goes with it.
                lead = re.sub(r"\n[ \t]*/\*(?:(?!\*/).)*\*/[ \t]*\n[ \t]*\Z", "\n", lead, flags=re.S)
                out += lead.rstrip(" ") if lead.endswith("\n") else re.sub(r"\n[ \t]*\Z", "", lead)
                rest = re.match(r"[ \t]*(?:/\*[^\n]*\*/)?[ \t]*(?=\n)", text[end:])
                at = end + (rest.end() if rest else 0)
                out = re.sub(r"\n[ \t]*\Z", "", out) if text[at:at + 1] == "\n" else out
                continue
            out += text[at:begin] + (tidy(new) if new != statement and "/*" not in new and '"' not in new else new)
            at = end
            if new != statement and re.match(r"return\b|goto\b", new) and not statement.startswith("return"):
                more = re.search(r"(?m)^\s*(?:case\b|default:|\w+:\s*$)", masked(text)[at:])
                at = at + more.start() if more else len(text.rstrip())
        return out

    def end(self, mask, at):
        """The end of the statement that begins here."""
        if mask[at] == "#":
            return mask.index("\n", at)
        if mask[at] == "{":
            return close(mask, at)
        word = re.match(r"(if|for|while|switch|do|else|case|default)\b|\w+\s*:(?!:)|MLFAB__\w+_EACH\(", mask[at:])
        kind = word.group() if word else ""
        if kind in ("if", "for", "while", "switch"):
            stop = self.end(mask, SPACE.match(mask, close(mask, mask.index("(", at))).end())
            other = SPACE.match(mask, stop).end()
            if kind == "if" and re.match(r"else\b", mask[other:]):
                return self.end(mask, SPACE.match(mask, other + 4).end())
            return stop
        if kind == "do":
            return mask.index(";", close(mask, mask.index("{", at))) + 1
        if kind in ("case", "default") or kind.endswith(":"):
            return split_end(mask, at)
        while mask[at] != ";":
            at = close(mask, at) if mask[at] in "([{" else at + 1
        return at + 1

    def statement(self, text):
        """The new text of one statement that names an absent member; None: it goes."""
        mask = masked(text)
        word = re.match(r"if|for|while|switch|do|case|default|\{", text)
        kind = word.group() if word and not re.match(r"\w", mask[word.end():] if word.group() != "{" else "") else ""
        if kind == "{":
            return "{" + self.body(text[1:-1]) + "}"
        if kind == "do":
            end = close(mask, mask.index("{"))
            begin = mask.index("{")
            return text[:begin] + self.statement(text[begin:end]) + self.fold(text[end:])[0]
        if kind in ("case", "default"):
            return text
        if kind in ("if", "for", "while", "switch"):
            begin = mask.index("(")
            end = close(mask, begin)
            inner = SPACE.match(mask, end).end()
            stop = self.end(mask, inner)
            condition, then, rest = text[begin + 1:end - 1], text[inner:stop], text[stop:]
            other = rest[SPACE.match(rest).end() + 4:].lstrip() if rest.strip() else ""
            if kind == "for":
                head = split(condition, re.compile(";"))
                if self.any.search(masked(condition)):
                    head[2], value = self.fold(head[2])
                    if value == 0:
                        return None
                    if value == 1:
                        head[2] = ""
                    head[0], head[4] = self.fold(head[0])[0], self.fold(head[4])[0]
                    condition = "".join(head)
                value = None
            else:
                condition, value = self.fold(condition)
            if kind == "while" and value == 0:
                return None
            if kind == "if" and value is None:
                gone = [self.dead(part) for part in (then, other)]
                if gone[0] or other and gone[1]:
                    if CALL.search(masked(condition)):
                        raise ValueError("a branch behind a call cannot run: %s" % text)
                    if gone[0] and other and gone[1]:
                        raise Unreachable(text)
                    value = not gone[0]
            if kind in ("for", "while") and self.dead(then):
                return None
            if kind == "if" and value is not None:
                left = then if value else other
                left = self.inside(left) if left else None
                if left is None or not left.strip("{} \n"):
                    return None
                return unwrapped(left)
            new = "{" + self.body(then[1:-1], True) + "}" if kind == "switch" else self.inside(then)
            if new is None or not new.strip("{} \n"):
                if other:
                    last = self.inside(other)
                    if last is None or not last.strip("{} \n"):
                        return None
                    if not last.startswith("{"):
                        last = "{\n" + last + "\n}"
                    return joined("if (%s) %s" % (negated(condition), last), last)
                if CALL.search(masked(condition)) and kind != "for":
                    raise ValueError("nothing is left behind a condition with a call: %s" % text)
                return None
            tail = ""
            if other:
                last = self.inside(other)
                if last is not None and last.strip("{} \n"):
                    tail = (" " if new.endswith("}") else "\n" + " " * 2) + "else " + last
            gap = " " if new.startswith("{") else text[end:inner]
            return joined("%s (%s)%s%s" % (kind, condition, gap, new), new) + tail
        return self.simple(text)

    def dead(self, text):
        try:
            self.inside(text) if text else None
            return False
        except Unreachable:
            return True

    def inside(self, text):
        if not self.any.search(masked(text)):
            return text
        return self.statement(text)

    def simple(self, text):
        call = re.match(r"(?:\(void\))?(\w+)\(", text)
        if call and call.group(1) in self.ends:
            return None
        if re.match(r"\(void\)", text) and self.path.fullmatch(text[6:-1].strip()):
            return None
        pieces = split(text[:-1], re.compile(r"(?<![=!<>])[-+|&]?=(?!=)"))
        targets = [self.path.fullmatch(piece.strip()) for piece in pieces[:-1:2]]
        if any(targets):
            value = self.fold(pieces[-1])[1]
            if self.forced.search(text) and set(re.findall(r"(\w+)\(", masked(pieces[-1]))) - self.pure:
                raise ValueError("a call gives the value of an absent member: %s" % text)
            if value != 0 and not self.forced.search(text) and not self.path.fullmatch(pieces[-1].strip()):
                raise ValueError("an absent member is set: %s" % text)
            left = [piece for piece, target in zip(pieces[:-1:2], targets) if not target]
            return "".join(left[0:1]).strip() + " = " + pieces[-1].strip() + ";" if left else None
        folded, value = self.fold(text[:-1])
        if value is not None and not text.startswith("return") or re.fullmatch(r"assert\(1\)|.* [-+|]= 0|[A-Z_0-9]+", folded):
            return None
        return shorter(folded + ";")


def split_end(mask, at):
    depth = 0
    while mask[at] != ":" or depth:
        depth += mask[at] == "?"
        depth -= mask[at] == ":" and depth > 0
        at += 1
    return at + 1


def shorter(text):
    """A statement on one line, if it has no comment and fits."""
    if "\n" not in text or "/*" in text or "{" in text:
        return text
    line = re.sub(r"(?<=[(!]) ", "", re.sub(r"\s*\n\s*", " ", text))
    return line if len(line) < WIDTH - 4 and not re.search(r'" "', line) else text


def tidy(text):
    """The text of a statement without the marks of what it has lost."""
    text = re.sub(r"(?<![\w\s]) *\((\d+)\)", r" \1", text) if re.search(r"[=,*] *\(\d+\)", text) else text
    text = re.sub(r"[ \t]+(?=[;)])", "", re.sub(r"(?<=[\w)\]])(?=&&|\|\||\?)", " ", text))
    return re.sub(r"\(\(([^()]*(?:\([^()]*\))?[^()]*)\)\)", r"(\1)", text) if text.startswith("if ((") else text


def joined(text, body):
    head = text[:len(text) - len(body)]
    return shorter(head) + body if "\n" in head.rstrip() else text


def negated(condition):
    return ("!%s" if re.fullmatch(r"[\w>.-]+", condition) else "!(%s)") % condition


def unwrapped(text):
    """The statements of a block, without its braces and a level to the left, if it declares nothing."""
    if not text.startswith("{"):
        return text
    inner = text[1:-1]
    if re.search(r"(?m)^ {2,}(?!return\b|else\b|goto\b)(?:const |static |unsigned |struct |enum )*\w+ \*?\w+(?: =|;|,|\[)", masked(inner)):
        return text
    lines = inner.strip("\n").split("\n")
    return "\n".join(line[2:] if line.startswith("  ") else line for line in lines).strip()


# ---- declarations

def drop_member(text, struct, name):
    """The text without this member of the struct; its comment goes with it."""
    head = "struct %s {" % struct
    if head not in text:
        raise ValueError("there is no struct %s" % struct)
    if re.search(r"%s \w+(?:\[\w*\])? = \{(?!\s*(?:[.}]|0\}|NULL\}))" % struct, text):
        raise ValueError("initializers of struct %s name no members" % struct)
    begin = text.index(head) + len(head)
    end = text.index("\n}", begin) + 1
    body = text[begin:end]
    mask = masked(body)
    found = re.search(r"(?<=[\s*,(])%s(?=[;,\[)])" % name, mask)
    if not found:
        raise ValueError("struct %s has no member %s" % (struct, name))
    first = max(mask.rfind(c, 0, found.start()) for c in ";{}") + 1
    first = SPACE.match(body, first).end()
    last = mask.index(";", found.end()) + 1
    if "(" not in mask[first:last] and "," in mask[first:last]:
        kind = re.match(r"(?:const |struct |enum |unsigned )*\w+\s+", body[first:last]).group()
        rest = [piece.strip() for piece in body[first + len(kind):last - 1].split(",")]
        rest = [piece for piece in rest if piece.lstrip("*").split("[")[0] != name]
        return text[:begin] + body[:first] + kind + ", ".join(rest) + ";" + body[last:] + text[end:]
    tail = re.match(r"[ \t]*(?:/\*(?:(?!\*/).)*\*/)?[ \t]*\n?", body[last:], re.S)
    before, after = body[:first].rstrip(" \t"), body[last + tail.end():]
    own = re.search(r"(?<=\n)[ \t]*/\*(?:(?!\*/).)*\*/\n\Z", before, re.S)
    if own and (not after.strip() or re.match(r"[ \t]*(?:/\*|\n)", after)):
        before = before[:own.start()]
    return text[:begin] + before + after + text[end:]


FOLLOWED = re.compile(r"\b(mlfab__\w+)(?= (\*?)(\w+))")


def drop_types(text):
    """The text without the structs of functions that nobody names any more."""
    mask = masked(text)
    count = collections.Counter(re.findall(r"\bmlfab__\w+", re.sub(r"(?m)^struct \w+;.*\n", "", mask)))
    called, uses = set(re.findall(r"\b(\w+)->", mask)), collections.defaultdict(collections.Counter)
    for name, star, word in FOLLOWED.findall(mask):
        uses[name][star, word] += 1
    # The name of a struct of the second kind is declared before.
    for typedef, pattern in (True, r"^typedef struct (mlfab__\w+) \{.*?\n\} \1;\n"), (False, r"^struct (mlfab__\w+) \{.*?\n\};\n"):
        for match in reversed(list(re.finditer(pattern, text, re.M | re.S))):
            name, own = match.group(1), masked(match.group())
            left = uses[name] - collections.Counter((star, word) for other, star, word in FOLLOWED.findall(own) if other == name)
            pointers = {word for star, word in left if star}
            # Passed on, but never called: a declaration is enough.
            passed = not pointers & called and all(star or word == name for star, word in left)
            unnamed = count[name] == WORD.findall(own).count(name) if typedef else passed
            if "(*" not in own or not unnamed and not (pointers and passed):
                continue
            for other, star, word in FOLLOWED.findall(own):
                uses[other][star, word] -= 1
            left = text[:comment(text, match.start())] if unnamed else text[:match.start()] + "typedef struct %s %s;\n" % (name, name)
            text = left + text[match.end():]
    return text


HEAD = re.compile(r"(?m)^(?:MLFAB__INTERNAL|static)[^;{}()=]*?\b(\w+)\([^;{}]*\)\s*([;{])")


@functools.lru_cache(maxsize=None)
def functions(mask):
    """The functions of the text: rows (name, begin, end), first definitions, then prototypes."""
    rows = [[], []]
    for match in HEAD.finditer(mask):
        prototype = match.group(2) == ";"
        rows[prototype].append((match.group(1), match.start(), match.end() if prototype else close(mask, match.end() - 1)))
    return rows


def heads(mask):
    """The functions in the order of the text: rows (name, begin, end, the text from the former name to this one), and the rest as a last row."""
    at = 0
    for name, begin, end in sorted(sum(functions(mask), []), key=lambda row: row[1]):
        head = mask.index(name + "(", begin)
        yield name, begin, end, mask[at:head]
        at = head + len(name)
    yield None, at, len(mask), mask[at:]


def uncalled(text):
    """The names of functions that stand nowhere but in their own text, prototypes, and functions that were found so, and that no macro can make."""
    mask = masked(text)
    made = tuple(set(re.findall(r"\b(\w+_)##", mask)) - {"mlfab__", "mlfab_"})
    count, own, gone = collections.Counter(WORD.findall(mask)), collections.Counter(), set()
    for name, begin, end in sum(functions(mask), []):
        own[name] += 1 if mask.count(name, begin, end) == 1 else WORD.findall(mask, begin, end).count(name)
    while True:
        found = {name for name in own.keys() - gone if count[name] == own[name] and not name.startswith(made)}
        if not found:
            return gone
        gone |= found
        for name, begin, end in sum(functions(mask), []):
            count.subtract(WORD.findall(mask, begin, end) if name in found else ())


def drop_functions(text, names):
    for _, begin, end in sorted((row for row in sum(functions(masked(text)), []) if row[0] in names), key=lambda row: -row[1]):
        if text[end - 1] == "}" or re.match(r"/\*|\n|#", text[end + 1:end + 3]):
            own = comment(text, begin)
            begin = begin if text.startswith("/* ====", own) else own
        after = text[end:]
        text = text[:begin] + (after.lstrip("\n") if text[end - 1] == "}" or after[:1] != "\n" else after[1:])
    return text


class Members:
    """Absent members, rows (struct, member), and how a function names them."""

    def __init__(self, text, rows):
        mask = masked(text)
        bodies = {name: body for name, body in re.findall(r"(?m)^(?:typedef )?struct (\w+) \{(.*?)\n\}", mask, re.S)}
        tags = dict(re.findall(r"typedef struct (\w+) (\w+);", mask))
        self.kinds = {struct: [re.compile(pattern % "|".join({struct, tags.get(struct, struct)})) for pattern in (
            r"(?<!\w)(?:%s)(?: const)? \*{0,2}(\w+)(?=[;,)\[= ])", r"(?<!\w)(?:%s) [^;(){}]*?, \*(\w+)(?= = |;)")] for struct, _ in rows}
        self.rows = {struct: sorted(member for other, member in rows if other == struct) for struct, _ in rows}
        everywhere = "\n".join(bodies.values())
        self.inner = {struct: self.names(struct, everywhere) for struct in self.rows}
        self.used = re.compile(r"\b(\w+)(?=(?:\[[^][]*\])?(?:->|\.)(%s)\b)" % "|".join(sorted({member for _, member in rows})))

    def names(self, struct, mask):
        """Of variables, or members, of this struct."""
        one, more = self.kinds[struct]
        return set(one.findall(mask)) | set(more.findall(mask)) - {"const"}

    @functools.lru_cache(maxsize=None)
    def paths(self, mask):
        """How this function names absent members: regular expressions."""
        used, ways = set(self.used.findall(mask)), []
        for struct, members in self.rows.items():
            here = [use for use in used if use[1] in members]
            names = here and self.inner[struct] | self.names(struct, mask)
            ways += [r"%s(?:\[[^][]*\])?(?:->|\.)%s" % use for use in sorted(here) if use[0] in names]
        return ways


@functools.lru_cache(maxsize=None)
def zeros(mask):
    """The arguments of calls in a piece of the text: {name: the indexes of those that are 0 in all calls}. An uncalled name has an empty set."""
    found = dict.fromkeys(re.findall(r"\b[a-z]\w+\b(?!\()", mask), set())
    for use in re.finditer(r"\b([a-z]\w+)\(", mask):
        name, end = use.group(1), use.end()
        if found.get(name) != set():
            text = mask[end:close(mask, end - 1) - 1]
            values = split(text, COMMA)[::2] if "0" in text or "NULL" in text else []
            now = {i for i, value in enumerate(values) if KNOWN.get(value.strip()) == 0}
            found[name] = found.get(name, now) & now
    return found


def zero_arguments(mask, known={}):
    """The arguments that are 0 in all calls of a function which nothing but calls name, but for those known: {function: their names}."""
    own = {name: mask[begin:mask.index("{", begin)] for name, begin, _ in functions(mask)[0]}
    zero, found = {}, {}
    for _, _, _, piece in heads(mask):
        for name in zeros(piece).keys() & own.keys():
            zero[name] = zero.get(name, zeros(piece)[name]) & zeros(piece)[name]
    for name in own:
        if zero.get(name):
            arguments = split(own[name][own[name].index("(") + 1:own[name].rindex(")")], COMMA)[::2]
            named = [re.search(r"(\w+)(?:\[[^]]*\])?$", one.strip()) for one in arguments]
            names = [named[i].group(1) for i in sorted(zero[name]) if i < len(named) and named[i]]
            found[name] = [argument for argument in names if argument not in known.get(name, [])]
    return {name: arguments for name, arguments in found.items() if arguments}


def pure(mask):
    """The functions that can change nothing: all of their pointers are const, and so are those of the functions that they call."""
    found = {}
    for name, begin, end in functions(mask)[0]:
        head = mask[begin:mask.index("{", begin)]
        arguments = head[head.index("(") + 1:head.rindex(")")]
        if all("*" not in argument or argument.strip().startswith("const ") for argument in arguments.split(",")) and "void " not in head[:head.index("(")]:
            found[name] = set(re.findall(r"\b(\w+)\(", mask[begin + len(head):end])) - {"if", "for", "while", "switch", "return"}
    while True:
        names = set(found) | Room.pure
        left = {name: calls for name, calls in found.items() if calls <= names}
        if len(left) == len(found):
            return names
        found = left


def without(text, members):
    """The text without these members, rows (struct, member), and all that depends on them; and the problems."""
    without_effect = pure(masked(text))
    forced = [member[:-1] for _, member in members if member.endswith("!")]
    Here = type("Here", (Room,), {"pure": without_effect, "forced": re.compile(r"(?:->|\.)(?:%s)\b" % ("|".join(forced) or "(?!)"))})
    members = [(struct, member.rstrip("!")) for struct, member in members]
    absent, problems = Members(text, members), []
    for struct, member in members:
        try:
            text = drop_member(text, struct, member)
        except ValueError as error:
            problems.append(str(error))
    always = zero_arguments(masked(text))
    for name in set(re.findall(r"(?m)^#define (\w+) NULL$", text)):
        if len(re.findall(r"#define %s\b" % name, text)) == 1:
            text = re.sub(r"\b%s\b" % name, "NULL", text.replace("#define %s NULL\n" % name, ""))
    # The tables of absent rooms.
    constants = {name: "0" for name in re.findall(r"(?m)^ABSENT_TABLE\(.*?(\w+)\(void\)\)$", text)}
    ends, never, zero = set(), set(), {}
    while True:
        room, stuck = Here((), constants, ends, never), set()
        out, at, mask, faults = [], 0, masked(text), []
        before = text
        for match in re.finditer(r"\n(?![#}\s/])[^;{}=]*\)[ \n]*\{", mask):
            begin, end = match.end() - 1, close(mask, match.end() - 1)
            own = match.group().split("(")[0].split()[-1].lstrip("*")
            paths = absent.paths(mask[match.start():end]) + zero.get(own, [])
            if begin < at or not paths and not room.any.search(mask[begin:end]):
                continue
            out.append(text[at:begin + 1])
            at = end - 1
            try:
                out.append((Here(paths, constants, ends, never) if paths else room).function(text[begin + 1:end - 1]))
            except Unreachable:
                stuck.add(own)
                out.append(text[begin + 1:end - 1])
            except (ValueError, AssertionError) as error:
                faults.append("%s: %s" % (own, error))
                out.append(text[begin + 1:end - 1])
        text = "".join(out) + text[at:]
        zero, former = zero_arguments(masked(text), always), zero
        if text == before and stuck <= never and zero == former:
            break
        never, constants, ends = never | stuck, {}, set()
        was, bodies = ({name: whole[begin:end] for name, begin, end in functions(whole)[0]} for whole in (mask, masked(text)))
        for name, body in bodies.items():
            inner = body[body.index("{") + 1:-1].strip()
            fixed = re.fullmatch(r"return (0|[A-Z][A-Z_0-9]+);", inner)
            if fixed and was.get(name) != body:
                constants[name] = fixed.group(1)
            if not inner and was.get(name) != body:
                ends.add(name)
        if not constants and not ends and not stuck and not faults and zero == former:
            break
    problems += faults
    text = drop_types(text)
    text = drop_functions(text, uncalled(text))
    return re.sub(r"\n{3,}", "\n\n", text), problems


# ---- prototypes

def stated_once(text):
    """The text without prototypes of functions whose body stands before their first use. Their comment goes to the body."""
    mask = masked(text)
    defined, prototypes = functions(mask)
    body = {}
    for name, begin, _ in defined:
        body[name] = None if name in body else begin
    early, ahead = set(re.findall(r"^ABSENT_\w+\(.*?\b(mlfab_\w+)[,(]", text, re.M)), set(body)
    for name, begin, _, piece in heads(mask):
        early |= ahead.intersection(WORD.findall(piece))
        ahead -= {name} if body.get(name) == begin else set()
    groups = []
    for name, begin, end in sorted(prototypes, key=lambda row: row[1]):
        line = text[end:text.index("\n", end)]
        free = body.get(name) is not None and name not in early and not line.strip()
        if groups and text[groups[-1][-1][2]:begin] == "\n":
            groups[-1].append((name, begin, end, free))
        else:
            groups.append([(name, begin, end, free)])
    edits = []  # (position, end, new text)
    for group in groups:
        begin = group[0][1]
        start = comment(text, begin)
        start = begin if re.match(r"/\* (?:====|---)", text[start:start + 9]) else start
        if all(free for _, _, _, free in group):
            edits.append((start, group[-1][2] + 1, ""))
            if start < begin:
                to = comment(text, min(body[name] for name, _, _, _ in group))
                edits.append((to, to, text[start:begin]))
        elif start == begin:
            edits += [(b, e + 1, "") for _, b, e, free in group if free]
    out, at = [], 0
    for begin, end, new in sorted(edits):
        out += [text[at:begin], new]
        at = end
    return re.sub(r"\n{3,}", "\n\n", "".join(out) + text[at:])
