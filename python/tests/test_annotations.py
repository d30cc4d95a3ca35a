"""What type checkers and editors see of the package."""
import ast
import inspect
import pathlib

import kvzap

FOLDER = pathlib.Path(inspect.getfile(kvzap)).parent
PUBLIC = ("__init__", "_end_to_end", "_errors", "_evaluate", "_flags", "_identity", "_kvpress", "_llm", "_program", "_report", "_samples",
          "_sampling", "_snapshot", "plot")


def functions_of(module, only=None):
    """Functions and methods of a module, but nested ones and, if `only` is given, those outside of this class."""
    for node in ast.parse((FOLDER / f"{module}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and only is None:
            yield node.name, node
        if isinstance(node, ast.ClassDef) and only in (None, node.name):
            for one in node.body:
                if isinstance(one, ast.FunctionDef):
                    yield f"{node.name}.{one.name}", one


def missing(function):
    """Parameters without an annotation, and "return"."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = [one.arg for one in named if one and one.annotation is None and one.arg not in ("self", "cls")]
    return names + ([] if function.returns else ["return"])


def test_functions_are_annotated():
    found = {f"{module}: {name}": missing(function)
             for module, only in (*((module, None) for module in PUBLIC), ("_transformers", "Cache"))
             for name, function in functions_of(module, only)
             if not (only and name.split(".")[1].startswith("_") and name.split(".")[1] != "__init__")}
    assert len(found) > 80
    assert {name: what for name, what in found.items() if what} == {}


def test_stubs_name_what_the_module_has():
    assert (FOLDER / "py.typed").exists()
    for name in kvzap.__all__:
        if name not in ("Cache", "kvgrad_scores", "train_end_to_end"):  # these import torch
            assert getattr(kvzap, name).__doc__, name
