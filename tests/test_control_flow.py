"""Code asks an exception for its type and its data, never for its words: rewording a message changes no result."""

import ast
import pathlib
import textwrap

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "numpyro_ext"


def exceptions_of(tree):
    """Names that stand for exceptions: bound by ``except``, or annotated with a type that says so."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    typed = [n for n in ast.walk(tree) if isinstance(n, ast.arg) and n.annotation is not None]
    ends = ("Error", "Exception", "Conflict")
    return names | {n.arg for n in typed if any(p.strip().endswith(ends) for p in ast.unparse(n.annotation).split("|"))}


def questions_about_words(source):
    """Lines that compare, search or match the text of an exception."""
    tree = ast.parse(source)
    names = exceptions_of(tree)

    def is_text(node):
        return any(
            (isinstance(n, ast.Call) and ast.unparse(n.func) in ("str", "repr") and ast.unparse(n.args[0]) in names)
            or (isinstance(n, ast.Attribute) and n.attr == "args" and ast.unparse(n.value) in names)
            for n in ast.walk(node)
        )

    tests = ("startswith", "endswith", "find", "index", "count", "match", "search", "fullmatch")
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Compare) and is_text(node))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in tests)
        and is_text(node)
    ]


def test_no_control_flow_by_the_text_of_an_error():
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := questions_about_words(path.read_text()))
    }
    assert found == {}, "give the exception an attribute, as ModelStructureError.reason"


@pytest.mark.parametrize(
    "question",
    ['"no field" in str(error)', 'str(error).startswith("no")', 'error.args[0] == "no"', 're.search("no", str(error))'],
)
def test_the_search_finds_such_code(question):
    code = f"""
        try:
            read()
        except ValueError as error:
            if {question}:
                raise
    """
    assert questions_about_words(textwrap.dedent(code)) == [5]
    assert questions_about_words(textwrap.dedent(code.replace(question, "error.reason is Reason.DATA"))) == []
