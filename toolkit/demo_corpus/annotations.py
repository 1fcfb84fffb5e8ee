"""What a parser finds in a function: the roles of its tokens, questions with answers in its text, its first sentence."""

from __future__ import annotations

import ast
import builtins
import io
import itertools
import keyword
import re
import tokenize
from collections.abc import Iterator

from toolkit.demo_corpus.stdlib import Function

TOKEN_ROLES = ("O", "KEYWORD", "BUILTIN", "NUMBER", "STRING", "DEF", "PARAM", "KWARG", "CALL", "ATTR", "VAR")
MOST_TOKENS = 96  # of a tagged sequence

_BUILTINS = frozenset(dir(builtins))


def token_roles(code: str) -> tuple[list[str], list[int]]:
    """The first tokens of the code and their roles, as indices into TOKEN_ROLES; empty where it doesn't tokenize."""
    try:
        found = list(itertools.islice(_code_tokens(code), MOST_TOKENS + 1))  # one more: a role depends on the next token
    except (tokenize.TokenError, SyntaxError):
        return [], []
    tokens: list[str] = []
    tags: list[int] = []
    depth, signature_depth = 0, None  # of brackets; inside the parentheses of a def, its own depth
    for place, token in enumerate(found[:MOST_TOKENS]):
        text = token.string
        before = found[place - 1].string if place else ""
        after = found[place + 1].string if place + 1 < len(found) else ""
        if token.type == tokenize.OP and text in "([{":
            depth += 1
        elif token.type == tokenize.OP and text in ")]}":
            depth -= 1
            if signature_depth == depth:
                signature_depth = None
        if before in ("def", "class"):
            role = "DEF"
            signature_depth = depth if before == "def" else None
        elif token.type == tokenize.NUMBER:
            role = "NUMBER"
        elif token.type == tokenize.STRING:
            role = "STRING"
        elif token.type == tokenize.OP:
            role = "O"
        elif keyword.iskeyword(text):
            role = "KEYWORD"
        elif signature_depth is not None and depth == signature_depth + 1 and before in ("(", ",", "*", "**"):
            role = "PARAM"
        elif before == ".":
            role = "CALL" if after == "(" else "ATTR"
        elif after == "=" and before in ("(", ",") and depth > 0:  # not the annotation of a parameter with a default
            role = "KWARG"
        elif text in _BUILTINS:
            role = "BUILTIN"
        else:
            role = "CALL" if after == "(" else "VAR"
        tokens.append(text[:40])
        tags.append(TOKEN_ROLES.index(role))
    return tokens, tags


def _code_tokens(code: str) -> Iterator[tokenize.TokenInfo]:
    """Names, numbers, strings and operators; an f-string is one string on every version (since 3.12 it comes in pieces)."""
    lines = code.split("\n")
    wanted = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    openings: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("FSTRING_START", "TSTRING_START"):
            openings.append(token)
        elif kind in ("FSTRING_END", "TSTRING_END"):
            first = openings.pop()
            if not openings:
                (top, left), (bottom, right) = first.start, token.end
                text = lines[top - 1][left : right if top == bottom else None]
                yield tokenize.TokenInfo(tokenize.STRING, text, first.start, token.end, first.line)
        elif token.type in wanted and not openings:
            yield token


def questions_about(function: Function) -> Iterator[tuple[str, int, int]]:
    """Question, and the start and end of its answer in `function.source`."""
    source = function.source
    try:
        node = ast.parse(source).body[0]
    except SyntaxError:
        return
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    lines = source.split("\n")

    def offset(line: int, byte: int) -> int:
        # ast counts UTF-8 bytes within a line
        return sum(len(each) + 1 for each in lines[: line - 1]) + len(lines[line - 1].encode()[:byte].decode())

    def span(found: ast.expr | ast.arg) -> tuple[int, int]:
        end = offset(found.end_lineno or 0, found.end_col_offset or 0)  # ast.parse sets them always
        return offset(found.lineno, found.col_offset), end

    name = source.index(f"def {node.name}") + len("def ")
    yield "What is the name of the function?", name, name + len(node.name)
    parameters = [each for each in node.args.args if each.arg not in ("self", "cls")]
    if parameters:
        start, _ = span(parameters[-1])  # its annotation, where it has one, is not part of the answer
        yield "What is the last positional parameter?", start, start + len(parameters[-1].arg)
    sentence = first_sentence(function.docstring)
    start, end = span(node.body[0].value) if isinstance(node.body[0], ast.Expr) else (0, 0)
    found = max(source.find(sentence, start, end), source.find(sentence[:-1], start, end))  # the full stop may be ours
    if sentence and found > 0:  # a sentence broken over lines is no span
        yield "What does the function do?", found, found + len(sentence) - (not source.startswith(sentence, found))
    inside = sorted(ast.walk(node), key=lambda each: (getattr(each, "lineno", 0), getattr(each, "col_offset", 0)))
    returned = [each.value for each in inside if isinstance(each, ast.Return) and each.value is not None]
    if returned:
        yield "What does it return first?", *span(returned[0])
    raised = [each.exc for each in inside if isinstance(each, ast.Raise) and each.exc is not None]
    if raised:
        yield "Which exception does it raise first?", *span(raised[0].func if isinstance(raised[0], ast.Call) else raised[0])


def first_sentence(docstring: str) -> str:
    """The first sentence of the first paragraph, ended by a full stop; empty where that is no sentence about the function."""
    paragraph = " ".join(re.split(r"\n\s*\n", docstring.strip(), maxsplit=1)[0].split())
    sentence = re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<=[.!?])\s+(?=[A-Z`'\"(])", paragraph, maxsplit=1)[0].strip()
    if len(sentence.split()) < 4 or not 20 <= len(sentence) <= 160 or not sentence[0].isupper():
        return ""
    if "->" in sentence or ">>>" in sentence or sentence.endswith((":", ",", ";")) or re.match(r"\w+\(", sentence):
        return ""  # a signature, an example, or a sentence that continues
    return sentence if sentence.endswith((".", "!", "?")) else sentence + "."
