"""A model's chat template, run by Jinja in its sandbox as transformers runs it. Imports jinja2 alone."""
import copy
import datetime
import json
import os

from .errors import OscarError

PROBE = "oscar int2 probe"


class ChatTemplateError(OscarError):
    """A template that cannot be run, or a conversation that it refuses."""


def _now():
    """Today, or the day of SOURCE_DATE_EPOCH, so that a run can be repeated."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch:
        return datetime.datetime.fromtimestamp(int(epoch), datetime.timezone.utc)
    return datetime.datetime.now()


def _environment():
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingPackage("jinja2", "chat templates need it") from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant says: it changes nothing of the text."""
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception,
                            "strftime_now": lambda form: _now().strftime(form)}
    return environment


class MissingPackage(OscarError):
    """A Python package that is not installed; its text says which and how to get it."""

    def __init__(self, package, why):
        import sys
        super().__init__(f"the Python package {package} is missing: {why}")
        self.hint = f"install it: {sys.executable} -m pip install {package}"


def joined_text(content):
    """The text of a message's content: parts of type text, a line each, as servers join them.

    Raises ChatTemplateError for parts of other types.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type", "no type") if isinstance(part, dict) else type(part).__name__
            raise ChatTemplateError(f"a message has a part that is no text ({kind})")
    return "\n".join(texts)


class ChatTemplate:
    """The templates of a model by name ("default", "tool_use", ...) with its special tokens (bos_token, ...)."""

    def __init__(self, texts, special_tokens):
        self.texts = dict(texts)
        self.special_tokens = dict(special_tokens)
        self._environment = None  # made for the first conversation: other rows need no jinja2
        self._compiled = {}
        self._kinds = {}

    def __bool__(self):
        return bool(self.texts)

    def render(self, messages, tools=None, documents=None, add_generation_prompt=False, **more):
        """The text of a conversation, as transformers' apply_chat_template(tokenize=False) gives it.

        Content in parts is joined where the template takes text alone, and text becomes a part where it takes
        parts alone. Arguments of tool calls that are JSON text become objects, as in servers; a template that
        fails on those gets them as text. Raises ChatTemplateError, with the template's own words where it
        refuses the conversation.
        """
        name = self._name(tools)
        messages = [self._fitted(name, message) for message in messages]
        values = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt, **more}
        try:
            return self._run(name, messages, values)
        except ChatTemplateError:
            as_text = _with_arguments_as_text(messages)
            if as_text is None:
                raise
            try:
                return self._run(name, as_text, values)
            except ChatTemplateError:
                pass
            raise

    def _name(self, tools):
        if tools is not None and "tool_use" in self.texts:
            return "tool_use"
        if "default" in self.texts:
            return "default"
        raise ChatTemplateError("the model has no chat template named default; it has " + ", ".join(self.texts))

    def _run(self, name, messages, values):
        if name not in self._compiled:
            self._environment = self._environment or _environment()
            try:
                self._compiled[name] = self._environment.from_string(self.texts[name])
            except Exception as error:  # SyntaxError, RecursionError and what else a compiler meets
                raise ChatTemplateError(f"the chat template is not valid: {error}") from error
        try:
            return self._compiled[name].render(messages=messages, **{**self.special_tokens, **values})
        except Exception as error:  # whatever a template raises
            raise ChatTemplateError(str(error) or type(error).__name__) from error

    def _shows(self, name, content):
        """Whether the template writes the probe's text, and not the parts as Python writes a list."""
        try:
            text = self._run(name, [{"role": "user", "content": content}],
                             {"tools": None, "documents": None, "add_generation_prompt": False})
        except ChatTemplateError:
            return False
        return PROBE in text and "'type'" not in text and '"type"' not in text

    def _kind(self, name):
        """What content a template takes: "text", "parts", or "both"."""
        if name not in self._kinds:
            parts = self._shows(name, [{"type": "text", "text": PROBE}])
            text = self._shows(name, PROBE)
            self._kinds[name] = ("both" if text else "parts") if parts else "text"
        return self._kinds[name]

    def _fitted(self, name, message):
        content = message.get("content")
        if isinstance(content, list):
            text = joined_text(content)  # refuses images
            if self._kind(name) == "text":
                return {**message, "content": text}
        elif isinstance(content, str) and self._kind(name) == "parts":
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


def _with_arguments_as_text(messages):
    """The messages with every call's arguments as JSON text; None where there are none to change."""
    changed, found = copy.deepcopy(messages), False
    for message in changed:
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            if isinstance(function.get("arguments"), dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
                found = True
    return changed if found else None
