"""What messages tell people to type."""

import ast
import re
import shlex
from pathlib import Path

from toolkit.system.console import as_typed

COMMAND = re.compile(r"(?:toolkit (?:train|generate|chat|evaluate|merge|push|report|replay|copy|diff|inspect|checkpoints|sagemaker)|"
                     r"\bpython|accelerate launch)\b[^.;:,]* $")  # fmt: skip


def test_a_command_comes_back_from_the_shell_as_the_words_it_was_made_of():
    """Spaces, quotes, dollars, brackets. Fails when: the words are joined by spaces alone."""
    words = ["toolkit", "generate", Path("runs/my sft"), "it's", "$HOME", "a*[1]", ""]
    assert shlex.split(as_typed(*words)) == [str(word) for word in words]


def test_no_message_puts_a_value_into_a_command_without_quotes(root):
    """In every text of the package, a value right after a command's words. Fails when: one is put there with {} alone, as
    `toolkit generate {directory}`."""
    found = []
    for path in sorted((root / "toolkit").rglob("*.py")):
        for text in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.JoinedStr)):
            for before, value in zip(text.values, text.values[1:], strict=False):
                if isinstance(before, ast.Constant) and isinstance(value, ast.FormattedValue) and COMMAND.search(str(before.value)):
                    found.append(f"{path.relative_to(root)}:{value.lineno}: {before.value}{{{ast.unparse(value.value)}}}")
    assert not found, "\n".join(found)
