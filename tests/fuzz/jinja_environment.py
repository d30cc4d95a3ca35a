"""The environment that transformers renders chat templates in. Importing it needs jinja2."""

import datetime
import json

import jinja2.ext
import jinja2.nodes
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text; its body is rendered like that of a call block."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args, **kwargs):
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(name)


class Dict:
    """The global `dict`: only its calls."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class Date(datetime.datetime):
    """kvzap's date is fixed."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def compiler():
    """Returns a name and a function that compiles templates: transformers' own if that is installed."""
    try:
        import transformers
        from transformers.utils import chat_template_utils
    except ImportError:
        return f"jinja2 {jinja2.__version__}", environment().from_string
    chat_template_utils.datetime = Date
    # pylint: disable=protected-access
    return f"transformers {transformers.__version__}", chat_template_utils._cached_compile_jinja_template


def prepared(messages):
    """Returns messages as transformers gives them to a template: without null fields, thoughts under both names."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    thoughts = [next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message), None)
                for message in messages]
    return [message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}
            for message, thought in zip(messages, thoughts)]


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["namespace"] = Namespace
    made.globals["dict"] = Dict()
    made.globals["strftime_now"] = Date.now().strftime
    return made
