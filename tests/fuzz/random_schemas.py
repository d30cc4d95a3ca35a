"""Schemas of the kinds that applications send: hand-written ones after well-known files, each with documents, and
random ones."""

import random

STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": name} for name in ("string", "integer", "number", "boolean", "null"))


def record(required=(), more=None, **properties):
    schema = {"type": "object", "properties": properties, "required": list(required)}
    if more is not None:
        schema["additionalProperties"] = more
    return schema


def strings(*values):
    return {"type": "string", "enum": list(values)}


def array(items, **limits):
    return {"type": "array", "items": items, **limits}


DRAFT7 = "http://json-schema.org/draft-07/schema#"

# A schema and documents that it allows.
WRITTEN = [
    # Calls of functions.
    (record(["location"], False, location=STRING, unit=strings("celsius", "fahrenheit")),
     ['{"location":"Bern"}', '{"location": "Bern", "unit": "celsius"}']),
    (record(["amount", "from", "to"], **{"amount": NUMBER, "from": STRING, "to": STRING}),
     ['{"amount":1.5,"from":"CHF","to":"EUR"}']),
    (record(["title"], title=STRING, tags=array(STRING), priority={"type": "integer", "minimum": 1, "maximum": 5}),
     ['{"title":"a","tags":["b","c"],"priority":5}']),
    (record(["name", "arguments"], False, name={"const": "search"},
            arguments=record(["query"], False, query={"type": "string", "minLength": 1},
                             limit={"type": "integer", "minimum": 1, "maximum": 100})),
     ['{"name":"search","arguments":{"query":"x","limit":100}}']),
    ({"oneOf": [record(["name", "arguments"], False, name={"const": name}, arguments={"type": "object"})
                for name in ("a", "b", "c")]}, ['{"name":"b","arguments":{"x":[1]}}']),
    ({"anyOf": [record(["kind", "radius"], False, kind=strings("circle"), radius=NUMBER),
                record(["kind", "side"], False, kind=strings("square"), side=NUMBER)]},
     ['{"kind":"circle","radius":2}', '{"kind":"square","side":0.5}']),
    # Extraction.
    (record(["people"], people=array(record(["name"], name=STRING, age={"type": ["integer", "null"], "minimum": 0}))),
     ['{"people":[{"name":"A","age":null},{"name":"B","age":30}]}']),
    (record(["label", "score"], False, label=strings("positive", "negative", "neutral"),
            score={"type": "number", "minimum": 0, "maximum": 1}), ['{"label":"neutral","score":0.25}']),
    (record(["steps", "answer"], False, steps=array(record(["text"], False, text=STRING), minItems=1, maxItems=8),
            answer=STRING), ['{"steps":[{"text":"x"}],"answer":"42"}']),
    (record(["date", "when"], date={"type": "string", "format": "date"}, when={"type": "string", "format": "date-time"}),
     ['{"date":"2026-11-29","when":"2026-11-29T10:17:04Z"}']),
    (record(["id"], id={"type": "string", "format": "uuid"}, mail={"type": "string", "format": "email"}),
     ['{"id":"123e4567-e89b-12d3-a456-426614174000","mail":"a@b.org"}']),
    (record(["price"], price={"type": "number", "minimum": 0, "exclusiveMaximum": 10000}), ['{"price":19.99}']),
    (record(["lat", "lon"], False, lat={"type": "number", "minimum": -90, "maximum": 90},
            lon={"type": "number", "minimum": -180, "maximum": 180}), ['{"lat":46.9,"lon":-7.4}']),
    # Configuration files.
    (record(["apiVersion", "kind", "metadata"], apiVersion=STRING, kind={"const": "Service"},
            metadata=record(["name"], name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
                            labels={"type": "object", "additionalProperties": STRING}),
            spec=record(ports=array(record(["port"], port={"type": "integer", "minimum": 1, "maximum": 65535},
                                           protocol=strings("TCP", "UDP"),
                                           targetPort={"anyOf": [INTEGER, STRING]})))),
     ['{"apiVersion":"v1","kind":"Service","metadata":{"name":"a-b","labels":{"x":"y"}},'
      '"spec":{"ports":[{"port":80,"protocol":"TCP","targetPort":"http"}]}}']),
    ({"$schema": DRAFT7, "definitions": {"stage": record(["name"], name=STRING, needs=array({"$ref": "#/definitions/stage"}))},
      "$ref": "#/definitions/stage"}, ['{"name":"a","needs":[{"name":"b","needs":[]}]}']),
    ({"type": "object", "patternProperties": {"^[a-z]+$": {"anyOf": [STRING, array(STRING)]}}, "additionalProperties": False},
     ['{"dev":"x","main":["a","b"]}']),
    (record(["name", "version"], name={"type": "string", "pattern": "^(?:@[a-z0-9-]+/)?[a-z0-9-._~]+$", "maxLength": 100},
            version={"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$"},
            dependencies={"type": "object", "additionalProperties": STRING}, private=BOOLEAN),
     ['{"name":"@a/b","version":"1.2.3","dependencies":{"c":"^1"},"private":true}']),
    ({"type": "object", "properties": {"on": {"oneOf": [strings("push", "release"), array(strings("push", "release"))]},
                                       "jobs": {"type": "object", "minProperties": 1}}, "required": ["on", "jobs"]},
     ['{"on":"push","jobs":{"a":{}}}', '{"on":["push","release"],"jobs":{"a":1}}']),
    ({"type": "object", "oneOf": [{"required": ["image"]}, {"required": ["build"]}],
      "properties": {"image": STRING, "build": STRING, "restart": BOOLEAN}, "additionalProperties": False},
     ['{"image":"x"}', '{"build":".","restart":true}']),
    ({"$schema": DRAFT7, "type": "array", "items": [STRING, INTEGER], "additionalItems": False, "minItems": 1},
     ['["a"]', '["a",1]']),
    ({"type": "array", "prefixItems": [STRING, INTEGER], "items": BOOLEAN, "minItems": 2}, ['["a",1]', '["a",1,true]']),
    # Events.
    ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "object", "properties": {
        "id": {"type": ["string", "null"], "maxLength": 36}, "value": {"type": ["number", "null"], "maximum": 1000000,
                                                                     "minimum": 0},
        "count": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}}, "additionalProperties": False},
     ['{"id":null,"value":3.5,"count":1}']),
    (record([], False, a={"type": "integer", "minimum": -32768, "maximum": 32767}, b={"type": "string", "maxLength": 255}),
     ['{"a":-32768,"b":""}', "{}"]),
    (record([], False, ip={"type": "string", "format": "ipv4"}, host={"type": "string", "format": "hostname"},
            six={"type": "string", "format": "ipv6"}, link={"type": "string", "format": "uri"}),
     ['{"ip":"1.2.3.4","host":"a.b","six":"::1","link":"https://a.b/c"}']),
    # News and content.
    (record(["type", "content"], type={"enum": ["text", "image", "list"]}, content={"anyOf": [STRING, array(STRING)]},
            additional_properties={"type": "object"}), ['{"type":"text","content":"x","additional_properties":{}}']),
    ({"$defs": {"node": {"type": "object", "properties": {"tag": STRING, "children": array({"$ref": "#/$defs/node"})},
                         "required": ["tag"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
     ['{"tag":"p","children":[{"tag":"b"}]}']),
    ({"allOf": [record(["a"], a=INTEGER), record(["b"], b=STRING)], "type": "object"}, ['{"a":1,"b":"x"}']),
    ({"type": "object", "properties": {"kind": strings("a", "b"), "v": {}}, "required": ["kind"],
      "if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["v"]}, "else": {"properties": {"v": False}},
      "additionalProperties": False}, ['{"kind":"a","v":1}', '{"kind":"b"}']),
    ({"type": "object", "properties": {"card": STRING, "address": STRING}, "dependentRequired": {"card": ["address"]},
      "additionalProperties": False}, ['{"card":"1","address":"x"}', '{"address":"x"}']),
    ({"enum": ["a", 1, None, True, {"x": [1, 2]}]}, ['"a"', "1", "null", '{"x":[1,2]}']),
    ({"type": "object", "propertyNames": {"pattern": "^[A-Z_]+$"}, "additionalProperties": STRING}, ['{"PATH":"x"}']),
    ({"type": "string", "pattern": "^\\+?[1-9]\\d{1,14}$"}, ['"+41791234567"']),
    ({"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 1000}, ["5", "995"]),
    ({"type": ["object", "array", "string", "number", "boolean", "null"]}, ["[]", "{}", '"a"']),
    ({}, ["1", '{"a":[null]}']),
    ({"oneOf": [INTEGER, NULL, array(INTEGER)]}, ["1", "null", "[1,2]"]),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ['"ab"', '"äöü"']),
    ({"type": "object", "minProperties": 1, "maxProperties": 2, "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER},
      "additionalProperties": False}, ['{"a":1}', '{"b":1,"c":2}']),
    ({"not": {"type": ["object", "array"]}}, ["1", '"a"']),
]


def number_limits(kind):
    low = random.choice([-1000, -7, 0, 1, 10, 99])
    limits = {"type": kind}
    if random.random() < 0.6:
        limits[random.choice(["minimum", "exclusiveMinimum"])] = low + random.choice([0, 0, 0.5])
    if random.random() < 0.6:
        limits[random.choice(["maximum", "exclusiveMaximum"])] = low + random.choice([3, 10, 1234])
    if kind == "integer" and random.random() < 0.2:
        limits["multipleOf"] = random.choice([1, 2, 5, 10, 20])
    return limits


PATTERNS = ["^[a-z]+$", "^a|b$", "\\d{2,3}", "^\\w{1,5}(-\\w+)*$", "^[^\"\\\\]*$", "x", "^(?:a|bc){2}$", "^.{3}$", "^$"]
FORMATS = ["date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "uri", "duration", "other"]
NAMES = ["id", "name", "type", "value", "a b", "x-y", "\"q\"", "größe", "items", "1", ""]


def text():
    schema = {"type": "string"}
    roll = random.random()
    if roll < 0.25:
        schema["pattern"] = random.choice(PATTERNS)
    elif roll < 0.45:
        schema["format"] = random.choice(FORMATS)
    elif roll < 0.65:
        schema["enum"] = random.sample(["a", "b\n", "é", "\"", "long text", ""], random.randint(1, 4))
    if random.random() < 0.3:
        schema["maxLength"] = random.choice([3, 10, 300])
    return schema


def members(depth):
    names = random.sample(NAMES, random.randint(0, 5))
    schema = {"type": "object", "properties": {name: any_schema(depth - 1) for name in names}}
    if names and random.random() < 0.8:
        schema["required"] = random.sample(names, random.randint(0, len(names)))
    roll = random.random()
    if roll < 0.5:
        schema["additionalProperties"] = False
    elif roll < 0.7:
        schema["additionalProperties"] = any_schema(depth - 1)
    if random.random() < 0.15:
        schema["patternProperties"] = {random.choice(["^x-", "e", "\\d"]): any_schema(depth - 1)}
    if random.random() < 0.1:
        schema["minProperties"] = random.randint(0, 2)
    if random.random() < 0.1:
        schema["maxProperties"] = random.randint(1, 4)
    if len(names) > 1 and random.random() < 0.1:
        schema["dependentRequired"] = {names[0]: [names[1]]}
    return schema


def any_schema(depth):
    roll = random.random()
    if depth <= 0 or roll < 0.35:
        return random.choice([text, text, lambda: number_limits("integer"), lambda: number_limits("number"),
                              lambda: BOOLEAN, lambda: NULL, lambda: {"const": random.choice([1, "c", None, [1], 2.5])},
                              lambda: {"type": ["string", "null"]}, lambda: True, lambda: {}])()
    if roll < 0.65:
        return members(depth)
    if roll < 0.8:
        schema = array(any_schema(depth - 1))
        if random.random() < 0.4:
            schema["minItems"] = random.randint(0, 3)
        if random.random() < 0.4:
            schema["maxItems"] = random.randint(1, 5)
        if random.random() < 0.2:
            schema["prefixItems"] = [any_schema(depth - 1) for _ in range(random.randint(1, 3))]
        return schema
    branches = [any_schema(depth - 1) for _ in range(random.randint(1, 3))]
    schema = {random.choice(["anyOf", "anyOf", "oneOf", "allOf"]): branches}
    if random.random() < 0.2:
        schema["not"] = random.choice([NULL, {"required": ["id"]}, {"const": "a"}, {"minimum": 5}])
    if random.random() < 0.1:
        schema["if"], schema["then"] = random.choice([({"type": "string"}, {"maxLength": 5}),
                                                      ({"required": ["name"]}, {"required": ["id"]})])
    return schema


def random_schema():
    schema = any_schema(3)
    if isinstance(schema, dict) and random.random() < 0.2:
        schema = {"$defs": {"x": any_schema(2)}, "type": "object",
                  "properties": {"self": {"$ref": "#"}, "x": {"$ref": "#/$defs/x"}, "y": schema},
                  "required": random.choice([[], ["x"]])}
    return schema
