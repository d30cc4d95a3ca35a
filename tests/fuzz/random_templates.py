"""Random templates of the language that kvzap interprets."""

import random

VARIABLES = {
    "s": " Zoë's <b>\u00a0\n", "e": "", "w": "one two  three", "n": 7, "m": -2, "z": 0, "f": 2.5, "t": True,
    "none_": None, "l": [3, 1, 2], "words": ["b", "A", "c", "a"], "d": {"b": 1, "a": [1, "x", None], "items": 5},
    "rows": [{"k": "x", "v": 1, "in": {"z": 1}}, {"k": "y", "v": 2}, {"k": "x", "v": 3}],
    "messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "<think>a</think>b"}],
}


def pick(*options):
    return random.choice(options)


def text(depth):
    if depth <= 0 or random.random() < 0.3:
        return pick("'a'", "'b c'", '"it\'s"', "''", "s", "w", "e", "'é日\\n'", "rows[0].k", "messages[0].content")
    inner = text(depth - 1)
    if "|" in inner or " " in inner:
        inner = f"({inner})"
    return pick(
        lambda: f"{inner} ~ {anything(depth - 1)}", lambda: f"({inner} + {text(depth - 1)})",
        lambda: f"{inner}.{pick('upper', 'lower', 'title', 'capitalize', 'strip', 'lstrip', 'rstrip')}()",
        lambda: f"{inner}.{pick('strip', 'lstrip', 'rstrip')}({text(0)})",
        lambda: f"{inner}|{pick('upper', 'lower', 'title', 'capitalize', 'trim', 'reverse', 'string', 'first', 'last')}",
        lambda: f"{inner}.replace({text(0)}, {text(0)}{pick('', ', 1', ', -1', ', 0')})",
        lambda: f"{inner}|replace({text(0)}, {text(0)}{pick('', ', 1')})",
        lambda: f"{inner}[{limit()}:{limit()}{pick('', ':-1', ':2', ':' + limit())}]",
        lambda: f"{inner}[{number(0)}]", lambda: f"{text(0)}.join({strings(depth - 1)})",
        lambda: f"{anything(depth - 1)}|tojson{pick('', '(indent=2)', '(sort_keys=true)', '(ensure_ascii=true)')}",
        lambda: f"{sequence(depth - 1)}|join({text(0)})", lambda: f"{inner}|indent{pick('', '(2)', '(1, true)', '(blank=true)')}",
        lambda: f"({inner} * {number(0)})", lambda: f"{inner}.{pick('removeprefix', 'removesuffix')}({text(0)})",
        lambda: f"'{pick('%s', '%5s|', '%-4s|', '%r')}' % {anything(depth - 1)}", lambda: f"'{{}}|{{}}'.format({anything(0)}, {inner})",
        lambda: f"{inner}|{pick('e', 'default')}", lambda: f"({inner} if {boolean(depth - 1)} else {text(depth - 1)})",
        lambda: f"{anything(depth - 1)}|string", lambda: f"{inner}.zfill({number(0)})",
    )()


def limit():
    # (Jinja2 gives constants with limits that are no integers another meaning than variables.)
    return pick("", "0", "1", "2", "-1", "-2", "10", "-10", "n", "m")


def number(depth):
    if depth <= 0 or random.random() < 0.3:
        return pick("0", "1", "2", "-1", "3", "n", "m", "z", "f", "1.5", "10", "rows[1].v", "true", "1e3", "-0.5")
    inner = number(depth - 1)
    return pick(
        lambda: f"({inner} {pick('+', '-', '*', '/', '//', '%')} {number(depth - 1)})", lambda: f"-{number(0)}",
        lambda: f"({pick('2', 'n', 'f', 'z', '1.5')} ** {pick('0', '1', '2', '-1', 'f')})", lambda: f"{text(depth - 1)}|length",
        lambda: f"{sequence(depth - 1)}|{pick('length', 'count', 'sum', 'max', 'min', 'first', 'last')}",
        lambda: f"{text(depth - 1)}|{pick('int', 'float', 'int(5)', 'float(2.0)', 'wordcount')}", lambda: f"{inner}|{pick('abs', 'int', 'float')}",
        lambda: f"{inner}|round{pick('', '(1)', '(2)', '(0, method=@ceil@)', '(1, @floor@)').replace('@', chr(39))}",
        lambda: f"{text(depth - 1)}.{pick('find', 'rfind', 'count', 'index')}({text(0)}{pick('', ', 1', ', 1, 5', ', -3')})",
        lambda: f"({sequence(depth - 1)}).{pick('index', 'count')}({number(0)})",
    )()


def boolean(depth):
    if depth <= 0 or random.random() < 0.2:
        return pick("true", "false", "t", "e", "n", "none", "nothing", "l", "d")
    return pick(
        lambda: f"({anything(depth - 1)} {pick('==', '!=')} {anything(depth - 1)})",
        lambda: f"({number(depth - 1)} {pick('<', '>', '<=', '>=')} {number(depth - 1)}{pick('', ' < 5')})",
        lambda: f"({text(depth - 1)} {pick('<', '>', 'in', 'not in')} {text(depth - 1)})",
        lambda: f"({anything(depth - 1)} {pick('in', 'not in')} {sequence(depth - 1)})",
        lambda: f"({boolean(depth - 1)} {pick('and', 'or')} {boolean(depth - 1)})", lambda: f"(not {boolean(depth - 1)})",
        lambda: f"({anything(depth - 1)} is {pick('', 'not ')}{test()})",
        lambda: f"{text(depth - 1)}.{pick('startswith', 'endswith')}({pick(text(0), '(' + text(0) + ', ' + text(0) + ')')})",
        lambda: f"{text(depth - 1)}.{pick('isdigit', 'isalpha', 'isspace', 'isupper', 'islower', 'isalnum')}()",
    )()


def test():
    return pick("defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "mapping", "iterable",
                "sequence", "true", "false", "odd", "even", "eq 1", "ne 'a'", "lt(3)", "ge 2", "in [1, 2]", "divisibleby 2",
                "sameas none", "callable", "upper", "lower", "equalto('a')", "gt 1.5", "escaped")


def strings(depth):
    return pick(
        lambda: "words", lambda: f"[{text(depth - 1)}, {text(depth - 1)}]", lambda: f"{text(depth - 1)}.split({pick('', text(0), text(0) + ', 1')})",
        lambda: f"{text(depth - 1)}.rsplit({pick('', text(0) + ', 1', 'none, 1')})", lambda: f"{text(depth - 1)}.splitlines()",
        lambda: f"{text(depth - 1)}|list", lambda: f"words|{pick('sort', 'unique', 'reverse')}|list", lambda: "words|map('upper')|list",
        lambda: "d|list", lambda: "d.keys()|list", lambda: "rows|map(attribute='k')|list", lambda: f"{text(depth - 1)}.partition({text(0)})",
    )()


def sequence(depth):
    if depth <= 0 or random.random() < 0.2:
        return pick("l", "words", "[]", "(1,)", "[1, 'a', none]", "range(3)|list", "d.items()|list", "rows", "[2.5, true]")
    inner = sequence(depth - 1)
    if "|" in inner:
        inner = f"({inner})"
    return pick(
        lambda: f"({inner} + {sequence(depth - 1)})", lambda: f"{inner}[{limit()}:{limit()}{pick('', ':-1', ':2')}]",
        lambda: f"[{anything(depth - 1)}, {anything(depth - 1)}]", lambda: f"({anything(depth - 1)}, {anything(depth - 1)})",
        lambda: f"{inner}|{pick('sort', 'sort(reverse=true)', 'unique|list', 'reverse|list', 'list', 'sort(case_sensitive=true)')}",
        lambda: f"{inner}|{pick('select', 'reject')}({pick('', '@odd@', '@string@', '@defined@', '@none@', '@number@').replace('@', chr(39))})|list",
        lambda: f"{inner}|map('{pick('string', 'tojson', 'length', 'list', 'int', 'default')}')|list", lambda: f"({inner} * {number(0)})",
        lambda: f"rows|{pick('selectattr', 'rejectattr')}('{pick('k', 'v', 'in', 'in.z', 'no')}'{pick('', ', @eq@, 1', ', @defined@', ', @equalto@, @x@').replace('@', chr(39))})|list",
        lambda: f"rows|map(attribute='{pick('k', 'v', 'in.z')}'{pick('', ', default=0')})|list", lambda: f"rows|groupby('{pick('k', 'v')}')",
        lambda: f"rows|sort(attribute='{pick('k', 'v', 'k,v')}'{pick('', ', reverse=true')})", lambda: f"{inner}|batch({pick('1', '2', '3, 0')})|list",
        lambda: "d|dictsort", lambda: f"d|{pick('items', 'dictsort(by=@value@)', 'dictsort(reverse=true)').replace('@', chr(39))}|list", lambda: strings(depth - 1),
        lambda: f"range({number(0)}, {number(0)}{pick('', ', 2', ', -1')})|list",
    )()


def anything(depth):
    if depth <= 0:
        return pick("1", "'x'", "none", "true", "nothing", "l", "d", "n", "f", "w", "{}", "[]", "()", "d.a", "d.no", "rows[0]", "d['items']")
    return pick(text, number, boolean, sequence, text, lambda inner: f"{{{pick('@a@', '1', 'none').replace('@', chr(39))}: {anything(inner - 1)}}}",
                lambda inner: f"{anything(inner - 1)}.{pick('a', 'no', 'k', 'items', '0')}",
                lambda inner: f"{anything(inner - 1)}[{pick('0', '-1', '@a@', '@k@', '1.0', 'none').replace('@', chr(39))}]",
                lambda inner: f"{anything(inner - 1)}|default({anything(0)}{pick('', ', true')})",
                lambda inner: f"dict(q={anything(inner - 1)}, **d)", lambda inner: f"{text(inner - 1)} {text(inner - 1)}" if random.random() < 0.05 else "d.get('b')")(depth - 1)


def space():
    return pick("", "", " ", "\n", "\n  ", "  \n", "x", " y ", "\u2003", "\n\n")


def tag(content):
    left, right = pick("", "", "-", "+"), pick("", "", "-", "+")
    return f"{{%{left} {content} {right}%}}"


def statement(depth, in_loop=False):
    if depth <= 0 or random.random() < 0.35:
        return "{{" + pick("", "-") + " " + anything(random.randrange(4)) + " " + pick("", "-") + "}}"
    inside = lambda loop=in_loop: body(depth - 1, loop)
    loops = [lambda: tag(f"if {boolean(1)}") + tag(pick("break", "continue")) + tag("endif")] if in_loop else []
    return pick(
        lambda: tag(f"if {boolean(2)}") + inside() + pick("", tag(f"elif {boolean(1)}") + inside()) + pick("", tag("else") + inside()) + tag("endif"),
        lambda: tag(f"for x in {sequence(2)}{pick('', ' if x', ' if x is string')}") + inside(True) + "{{ x }}{{ loop." + pick(
            "index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem", "depth", "cycle(1, 2)", "changed(x)") + " }}"
        + pick("", tag("else") + inside()) + tag("endfor"),
        lambda: tag(f"for k, v in {pick('d.items()', 'd|items', 'd|dictsort', sequence(1))}") + "{{ k }}={{ v }}" + inside(True) + tag("endfor"),
        # (A variable of the template that a block assigns to is undefined in blocks inside before it.)
        lambda: tag(f"set {pick('x', 'y', 'q', 'x, y')} = {anything(2)}"), lambda: tag(f"set x{pick('', ' | upper', ' | trim | length')}") + inside(False) + tag("endset"),
        lambda: tag("set ns = namespace(c=0)") + tag(f"for i in {sequence(1)}") + tag("set ns.c = ns.c + 1") + inside(True) + tag("endfor") + "{{ ns.c }}{{ ns.no }}",
        lambda: tag(f"macro g(a{pick('', ', b')}, c={anything(1)})") + "{{ a }}{{ c }}" + inside(False) + pick("", "{{ caller() }}", "{{ varargs }}{{ kwargs }}") + tag("endmacro")
        + "{{ g(" + pick("", "1", "1, 2", "1, c=2", "1, 2, 3, 4", "a=1, q=2") + ") }}" + pick("", tag("call g(3)") + inside(False) + tag("endcall")),
        lambda: tag(f"filter {pick('upper', 'trim', 'replace(@a@, @b@)', 'length', 'indent').replace('@', chr(39))}") + inside(False) + tag("endfilter"),
        lambda: tag(f"with x = {anything(1)}, y = x") + inside() + "{{ x }}{{ y }}" + tag("endwith"),
        lambda: tag("generation") + inside(False) + tag("endgeneration"), lambda: tag("raw") + "{{ x }} {% if %}" + space() + tag("endraw"),
        lambda: "{#" + pick("", "-", "+") + " c " + pick("", "-", "+") + "#}", *loops)()


def body(depth, in_loop=False):
    return "".join(space() + statement(depth, in_loop) for _ in range(random.randrange(1, 4))) + space()


def random_template():
    return body(random.randrange(3))
