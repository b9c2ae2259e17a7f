"""The architecture page holds the tree as it is, and every place where verl is touched."""

import ast
import re
from itertools import pairwise

import pytest

from docs.tree import BEGIN, END, PACKAGES, PAGE, ROOT, first_sentence, with_tree

ENGINE_CLIENT = "training/verl_adapters/engine_client.py"


def _imports_verl(text: str) -> bool:
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
        if any(name.split(".")[0] == "verl" for name in names):
            return True
    return False


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def test_the_tree_of_the_architecture_page_is_the_tree() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tree(page), "write it anew: python -m docs.tree"


def test_every_module_says_in_one_sentence_what_it_is() -> None:
    modules = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    assert len(modules) > 100
    silent = [path for path in modules if path.name != "__init__.py" and not first_sentence(path)]
    assert silent == []


def test_every_docstring_of_a_value_follows_its_value() -> None:
    wrong = []
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for parent in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
            wrong += [
                f"{path.relative_to(ROOT)}:{after.lineno}"
                for before, after in pairwise(parent.body)
                if _is_text(after) and not isinstance(before, ast.Assign | ast.AnnAssign)
            ]
    assert wrong == []


@pytest.mark.slow
def test_every_file_that_imports_verl_is_named_where_verl_is_touched() -> None:
    section = (
        PAGE.read_text(encoding="utf-8").split("## Where verl is touched")[1].split("\n## ")[0]
    )
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    importing = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if _imports_verl(path.read_text(encoding="utf-8"))
    }
    assert importing - named == set()


@pytest.mark.parametrize("file", ["plugin.py", "training/queue_namespace.py", ENGINE_CLIENT])
def test_every_object_of_verl_that_is_replaced_is_in_the_table(file: str) -> None:
    section = PAGE.read_text(encoding="utf-8").split("## What is replaced at run time")[1]
    section = section.split("\n## ")[0]
    assigned = [
        target
        for node in ast.walk(ast.parse((ROOT / "agent_loop" / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
    ]
    names = {target.attr for target in assigned if ast.unparse(target.value) != "self"}
    assert names
    assert {name for name in names if name not in section} == set()


def test_a_first_sentence_ends_at_its_full_stop(tmp_path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""What `a.b` is,\nin verl 0.9.1. Pure.\n\nMore.\n"""\n')
    assert first_sentence(module) == "What `a.b` is, in verl 0.9.1"


def test_a_first_sentence_goes_on_after_the_authors_of_a_source(tmp_path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Rewards of a program (Li et al. 2023), in Python. Pure."""\n')
    assert first_sentence(module) == "Rewards of a program (Li et al. 2023), in Python"


def test_every_package_of_the_distribution_is_in_the_tree() -> None:
    found = re.search(
        r"^include = (\[[^]]*\])", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M
    )
    assert found is not None
    assert {name.removesuffix(".*") for name in ast.literal_eval(found[1])} == set(PACKAGES)


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks"):
        with_tree(f"{END} before {BEGIN}")
