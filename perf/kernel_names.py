# Names of CUDA kernels as people read them, from the compiler's. Needs Python 3.8 alone.
import re

ENUMERATORS = {  # include/kvzap/core/quantised_rows.hpp, src/linalg/quantised/format.hpp
    "RowType": ["wide", "q8", "q4", "q3", "q2"],
    "CodeKind": ["nibbles", "centred_nibbles", "five_bits", "centred_five_bits", "six_bits", "bytes", "table", "float8"],
    "ScaleKind": ["single", "half", "half_minimum", "half_zero", "exponent", "group_minimum", "group_of_16"],
}  # fmt: skip


def arguments_of(text):
    """Top-level arguments of the template whose list begins the text after "<"."""
    parts, depth, begin = [], 0, 0
    for at, c in enumerate(text):
        if c in "<({[":
            depth += 1
        elif c in ">)}]":
            depth -= 1
            if depth < 0:
                return parts + [text[begin:at].strip()]
        elif c == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    return parts


def outer_name(functor):
    """A name of people's size: function or class, with its template arguments, and the number of a lambda."""
    lambda_number = re.search(r"\{lambda\([^{}]*\)#(\d+)\}$", functor)
    name, depth = functor, 0
    for at, c in enumerate(functor):
        if c == "(" and depth == 0 and "lambda" in functor[at:]:
            name = functor[:at]
            break
        depth += (c == "<") - (c == ">")
    name = re.sub(r"\((?:\w+::)*(RowType|CodeKind|ScaleKind)\)(\d)", lambda m: ENUMERATORS[m[1]][int(m[2])], name)
    base = name.partition("<")[0]
    name = base.rpartition("::")[2] + name[len(base):]
    name = re.sub(r"<View<.*", "", re.sub(r"\b(\w+::)+", "", name))
    name = name.replace("> >", ">>")
    return name + (f" #{lambda_number[1]}" if lambda_number and lambda_number[1] != "1" else "")


def kernel_of(demangled):
    """(name, policy) of one of kvzap's kernels, else None."""
    text = re.sub(r"_INTERNAL_\w+?::|\(anonymous namespace\)::|Kokkos::(Impl::)?|kvzap::(?!attention|cache|linalg|selection)", "", demangled)
    match = re.search(r"Parallel(For|Reduce|Scan)<", text)
    if not match:  # of CUDA alone, such as void kvzap::attention::cuda::attend_parts<...>(...)
        own = re.match(r"void (?:kvzap::)?(?:\w+::)+cuda::(\w+<.*>)\(", text)
        return (outer_name(own[1].replace("kvzap::", "")), "block") if own else None
    functor, policy = (arguments_of(text[match.end():]) + ["", ""])[:2]
    if functor.startswith("CombinedFunctorReducer<"):
        functor = arguments_of(functor.partition("<")[2])[0]
    if functor.startswith("View"):  # fills of views
        return None
    return outer_name(functor.replace("kvzap::", "")), "team" if "TeamPolicy" in policy else "range"


def short_name(demangled):
    """The same for any kernel, such as one of a library."""
    known = kernel_of(demangled)
    if known:
        return known[0]
    name = re.sub(r"^(void|int) ", "", demangled).partition("(")[0].partition("<")[0]
    return name.rpartition("::")[2] or demangled
