"""Random forms of answers, many of which no client should send: JSON schemas, regular expressions, grammars in GBNF, tools.
Each is a function of the `random.Random` it is given."""
import json

TEXTS = ["", "a", "number", "\0", "é", "\U0001f600", "\ud800", "<|im_end|>", "</think>", "<tool_call>", "x" * 3000, "a\nb", '"', "\\", "$ref"]
NUMBERS = [0, 1, -1, 2, 5, 0.5, -0.0, 1e-9, 1e300, 10**400, 2**63, -(2**63), 2**64, 100000, 100001, 1.7976931348623157e308]
COUNTS = [0, 1, 2, 3, 7, 100, 6000, 100000, 100001, 2**31, 2**63, -1, 1.5, "1", None]
FORMATS = ["date", "time", "date-time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6", "uri", "regex", "", 5]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object", "", "any", None, 5]
NAMES = ["a", "b", "number", "zone", "", "a/b", "~0", "\u00e9", "x" * 200]
REFERENCES = ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/$defs/none", "#a", "#/", "other.json#/a", "http://x/y", "#/$defs/a/items", "", "%",
              "#/%ff", "#/$defs/" + "a/" * 500]

HOSTILE_EXPRESSIONS = [
    "(a*)*b", "(a|aa)+$", "(?:(?:a{1000}){1000}){1000}", "a{0,100000}{0,100000}", "(" * 20000 + ")" * 20000, "[^]*[^]*[^]*[^]*x", "(a?){300}a{300}",
    r"(?=a)b", r"(a)\1", r"\p{L}+\p{Lu}{3,50}", "[\\u{10000}-\\u{10FFFF}]{1,40}", "[b-a]", "a{3,2}", "a{99999999999999999999}", "(?<n>a)(?<n>b)", "(?P<n>a)",
    "[", "(", "\\", "*", "a**", "(?i)a", "\\x", "\\u{110000}", "\ud800", "|" * 5000, "^$" * 200, "(^a|b$)*", "[a-z]*" * 400, "(a|b|c|d)*a(a|b|c|d){12}",
    ".{0,2000}.{0,2000}", "(.*a){20}", "((a{1,50}){1,50}){1,50}", "\0", "(?:" + "|".join(f"w{i}" for i in range(4000)) + ")*"]

HOSTILE_GRAMMARS = [
    "root ::= root", 'root ::= root "a" | "a"', "root ::= a\na ::= b\nb ::= a | root", 'root ::= root root | "a" | ""', 'root ::= s\ns ::= s s | s s s | "a" | "b"',
    'root ::= (("a"*)*)*', 'root ::= "a"{1000000}', 'root ::= ("a"{1000}){1000}', 'root ::= ("a"{0,60000}){0,60000} "b"', "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
    "root ::= " + "(" * 99 + '"a"' + ")*" * 99, "root ::= [^]", "root ::= []", "root ::= [\\U00110000]", "root ::= none", "", "root", "root ::=", 'a ::= "b"', "root ::= (",
    'root ::= "a', "root ::= [a-", "root ::= " + " | ".join(f'"{i}"' for i in range(20000)),
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"', "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(60)) + '\nr60 ::= "a"',
    "root ::= r0\n" + "\n".join(f'r{i} ::= "a"? r{i + 1} "b"?' for i in range(2000)) + '\nr2000 ::= "c"', "\n".join(f'r{i} ::= "a"' for i in range(70000)),
    'root ::= [a-z ] root | [a-z ] root [a-z ] | [a-z ]', 'root ::= "a" root "a" | "b" root "b" | ""', "root ::= .* .* .* .* root | .", 'root ::= (root? root? root? "a")*',
    'root ::= a b c d e\na ::= ""|"x"a\nb ::= ""|"x"b\nc ::= ""|"x"c\nd ::= ""|"x"d\ne ::= ""|"x"e', "start: a\na: /b/", 'root ::= "\\xff"', "root ::= <tool>", '# \0\nroot ::= "\\u0000"',
    "root ::= " + '"a" ' * 60000, 'root ::= x{5,2}\nx ::= "a"', 'root ::= "a"{99999999999999999999}']


def expression(draw, depth=0):
    """A regular expression."""
    if depth == 0 and draw.random() < 0.35:
        return draw.choice(HOSTILE_EXPRESSIONS)
    kind = draw.randrange(9 if depth < 4 else 4)
    if kind < 2:
        return draw.choice(["a", "5", " ", ".", "é", "\\d", "\\w", "\\s", "\\S", "\\.", "\\n", "\\x41", "\\u0041", "\\p{N}", "\U0001f600", "[^]", "x{2}"])
    if kind == 2:
        return draw.choice(["[a-z]", "[^a-z]", "[0-9a-f]{4}", "[\\d\\s]", "[a-", "[\\]]", "[\U0001f600-\U0001f64f]"])
    if kind == 3:
        return draw.choice(["^", "$", "\\b", "(?:)", "|", "()"]) if draw.random() < 0.2 else "b"
    if kind < 6:
        return "".join(expression(draw, depth + 1) for _ in range(draw.randrange(1, 5)))
    if kind == 6:
        return "(?:" + "|".join(expression(draw, depth + 1) for _ in range(draw.randrange(1, 4))) + ")"
    return "(" + expression(draw, depth + 1) + ")" + draw.choice(
        ["*", "+", "?", "*?", "{3}", "{0,7}", "{2,}", "{500}", "{1,60000}", "{2,1}", ""])


def gbnf(draw):
    """A grammar in GBNF."""
    if draw.random() < 0.4:
        return draw.choice(HOSTILE_GRAMMARS)
    names = ["root", *(f"r{i}" for i in range(draw.randrange(5)))]

    def part(depth):
        kind = draw.randrange(8 if depth < 4 else 5)
        if kind < 2:
            return draw.choice(['"a"', '"5"', '" "', '"The"', '"\\n"', '"\\u00e9"', '"\U0001f600"', '""'])
        if kind == 2:
            return draw.choice(["[a-z]", "[^\\n]", "[0-9]", ".", "[ \\t]", "[a-zA-Z0-9_ .]", "[\\U0001F600-\\U0001F64F]"])
        if kind < 5:
            return draw.choice(names)
        if kind == 5:
            return "(" + body(depth + 1) + ")" + draw.choice(["", "*", "+", "?", "{3}", "{0,9}", "{2,}", "{1,60000}"])
        return part(depth + 1) + draw.choice(["*", "+", "?", "{2}", "{0,1000}"])

    def body(depth):
        return " | ".join(" ".join(part(depth) for _ in range(draw.randrange(1, 4))) for _ in range(draw.randrange(1, 4)))

    return "\n".join(f"{name} ::= {body(0)}" for name in names)


def keywords(draw, depth):
    """Some keywords of a schema with their values, right or not."""
    def inner():
        return schema(draw, depth + 1)

    def some(most=3):
        return [inner() for _ in range(draw.randrange(most + 1))]

    def named(most=3):
        return {draw.choice(NAMES): inner() for _ in range(draw.randrange(most + 1))}

    def value():
        return draw.choice([None, True, {}, [], draw.choice(TEXTS), draw.choice(NUMBERS), {"a": [1]}])

    makers = {
        "type": lambda: draw.choice([draw.choice(TYPES), draw.sample(TYPES, 2)]),
        "enum": lambda: [value() for _ in range(draw.choice([0, 1, 3, 3, 2000]))], "const": value,
        "properties": named, "required": lambda: draw.sample(NAMES, draw.randrange(4)), "additionalProperties": inner,
        "patternProperties": lambda: {expression(draw): inner() for _ in range(draw.randrange(3))}, "propertyNames": inner,
        "items": inner, "prefixItems": some, "additionalItems": inner, "contains": inner, "uniqueItems": lambda: draw.random() < 0.5,
        "anyOf": some, "oneOf": some, "allOf": some, "not": inner, "if": inner, "then": inner, "else": inner,
        "pattern": lambda: expression(draw), "format": lambda: draw.choice(FORMATS), "multipleOf": lambda: draw.choice(NUMBERS),
        "$ref": lambda: draw.choice(REFERENCES), "$defs": lambda: {"a": inner(), "b": inner()}, "$anchor": lambda: "a", "$id": lambda: "x",
        "dependentSchemas": named, "dependentRequired": lambda: {"a": ["b"], "b": ["a"]}, "nullable": lambda: True,
        "unevaluatedProperties": inner, "unevaluatedItems": inner, "$dynamicRef": lambda: "#", "title": lambda: draw.choice(TEXTS), "x-unknown": value,
    }  # fmt: skip
    for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        makers[bound] = lambda: draw.choice(NUMBERS)
    for count in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
        makers[count] = lambda: draw.choice(COUNTS)
    # Mostly keywords of one type, so that most schemas are right.
    alike = draw.choice([["type"], ["type", "properties", "required", "additionalProperties"], ["type", "items", "minItems", "maxItems"],
                         ["type", "minLength", "maxLength"], ["type", "pattern"], ["type", "minimum", "maximum"], ["anyOf"], ["allOf", "anyOf"], ["enum"],
                         ["$ref", "$defs"], list(makers)])
    return {name: makers[name]() for name in draw.sample(alike, draw.randrange(1, min(4, len(alike)) + 1))}


def schema(draw, depth=0):
    """A JSON schema."""
    if depth == 0 and draw.random() < 0.25:
        return hostile_schema(draw)
    if depth > 4 or draw.random() < 0.15:
        return draw.choice([True, False, {}, {"type": "string"}, {"type": "integer"}, {"const": 5}, {"$ref": "#"}, None, 5, []])
    return keywords(draw, depth)


def hostile_schema(draw):
    """A schema that is much work: deep, wide, recursive, or with many ways through it."""
    count = draw.choice([3, 20, 200, 1000])
    kind = draw.randrange(12)
    if kind == 0:
        return {"$ref": "#"}
    if kind == 1:
        return {"$defs": {str(i): {"$ref": f"#/$defs/{(i + 1) % count}"} for i in range(count)}, "$ref": "#/$defs/0"}
    if kind == 2:
        return {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": k}}} for k in range(3)]} for i in range(min(count, 40))]}
    if kind == 3:
        return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}, "minProperties": draw.choice(COUNTS)}
    if kind == 4:
        return {"$defs": {f"n{i}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}, {"$ref": "#"}]}} for i in range(count)}
                | {f"n{count}": {"type": "null"}}, "$ref": "#/$defs/n0"}
    if kind == 5:
        return {"enum": [f"value {i}" for i in range(20 * count)]}
    if kind == 6:
        inner = {"type": "integer"}
        for _ in range(min(count, 58)):
            inner = draw.choice([{"items": inner}, {"properties": {"a": inner}, "required": ["a"]}, {"anyOf": [inner, {"const": 5}]}, {"not": inner}])
        return inner
    if kind == 7:
        # As a text it may be nested deeper than a body.
        return draw.choice(['{"items":', '{"not":', '{"a":', "["]) * (count * 40) + "{}" + "}" * (count * 40)
    if kind == 8:
        return {"oneOf": [{"properties": {"a": {"pattern": expression(draw)}}, "required": [f"p{i}"]} for i in range(min(count, 60))]}
    if kind == 9:
        return {"type": "string", "pattern": expression(draw), "format": draw.choice(FORMATS), "minLength": draw.choice(COUNTS), "maxLength": draw.choice(COUNTS)}
    if kind == 10:
        return {"allOf": [{"if": {"minimum": i}, "then": {"maximum": i + 5}, "else": {"not": {"const": i}}} for i in range(min(count, 40))]}
    return {"type": "array", "minItems": draw.choice(COUNTS), "maxItems": draw.choice(COUNTS), "items": {"$ref": "#"}, "prefixItems": [{"$ref": "#"}] * min(count, 100)}


def form(draw):
    """Fields that restrict an answer."""
    kind = draw.randrange(11)
    if kind == 0:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": draw.random() < 0.5, "schema": schema(draw)}}}
    if kind == 1:
        return {"response_format": draw.choice([{"type": "json_object"}, {"type": "text"}, {"type": "json_object", "schema": schema(draw)}, {"type": "xml"}, {}, [], "json"])}
    if kind == 2:
        return {draw.choice(["guided_json", "json_schema"]): draw.choice([schema(draw), json.dumps(schema(draw))])}
    if kind < 5:
        return {"guided_regex": expression(draw)}
    if kind < 8:
        return {draw.choice(["grammar", "guided_grammar"]): gbnf(draw)}
    if kind == 8:
        return {"guided_choice": draw.choice([[], ["a"], ["", "a"], TEXTS, ["a" * i for i in range(1000)], [str(i) for i in range(5000)], "a", [5]])}
    if kind == 9:
        inner = draw.choice([{"json": schema(draw)}, {"regex": expression(draw)}, {"grammar": gbnf(draw)}, {"choice": TEXTS}, {"json_object": True},
                             {"json": {}, "regex": "a"}, {"unknown": 1}, [], None])
        return {"structured_outputs": inner}
    return {**form(draw), **form(draw)}  # mostly exclude each other


def tools(draw, shape):
    """Tools and a choice of them, in the shape of "chat", "responses" or "messages"."""
    names = ["now", "later", "a.b-c", "", "x" * 129, "é", "now", None]
    listed = []
    for _ in range(draw.choice([0, 1, 1, 2, 3, 300])):
        name = draw.choice(names[:3]) if draw.random() < 0.8 else draw.choice(names)
        function = {"name": f"{name}{len(listed)}" if name and draw.random() < 0.9 else name, "description": draw.choice(TEXTS)}
        if draw.random() < 0.8:
            function["input_schema" if shape == "messages" else "parameters"] = schema(draw, 0 if len(listed) < 4 else 5)
        if draw.random() < 0.3:
            function["strict"] = draw.choice([True, False, None, 5])
        if shape == "chat":
            listed.append({"type": draw.choice(["function"] * 9 + ["web_search"]), "function": function})
        else:
            listed.append({**function, "type": "function"} if shape == "responses" else function)
    wanted = draw.choice(["now0", "later0", "none"])
    choices = {"chat": ["auto", "none", "required", "any", 5, {"type": "function", "function": {"name": wanted}}, {"type": "function"}],
               "responses": ["auto", "none", "required", {"type": "function", "name": wanted}, {"type": "web_search"}],
               "messages": [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": wanted}, {"type": "any", "disable_parallel_tool_use": True},
                            {}, "auto"]}
    fields = {"tools": listed}
    if draw.random() < 0.7:
        fields["tool_choice"] = draw.choice(choices[shape])
    if draw.random() < 0.2 and shape != "messages":
        fields["parallel_tool_calls"] = draw.choice([True, False, 5])
    return fields
