"""Rows of text files as people have them, to documents. Imports the standard library; .parquet and .zst need more.

A row is what a line of .jsonl, an entry of a .json list or a row of .parquet holds. Columns that are null
count as absent. It is read by the first of these that it has:

    messages                      a conversation (also as JSON text), with tools and documents
    conversations                 ShareGPT: from and value, or role and content; system and tools beside it
    prompt, completion            text, or lists of messages
    instruction, input, output    Alpaca, with system and history
    text
"""
import gzip
import io
import json

from .chat_template import ChatTemplateError, MissingPackage
from .errors import OscarError

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
PACKED = (".gz", ".zst")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
          "observation": "tool", "function_response": "tool"}


class BadRow(OscarError):
    """A row that holds no document; its text says why."""


class BadFile(OscarError):
    """A file that cannot be read at all."""


def unpacked(content, suffix):
    """The bytes of a .gz or .zst file. Raises BadFile, MissingPackage."""
    try:
        if suffix == ".gz":
            return gzip.decompress(content)
        try:
            from compression import zstd  # Python 3.14
            return zstd.decompress(content)
        except ImportError:
            pass
        try:
            import zstandard
        except ImportError as error:
            raise MissingPackage("zstandard", ".zst files need it") from error
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content), read_across_frames=True) as stream:
            return stream.read()
    except (OSError, EOFError, ValueError) as error:
        raise BadFile(f"not a sound {suffix} file: {error}") from error
    except Exception as error:
        if type(error).__name__ == "ZstdError":
            raise BadFile(f"not a sound {suffix} file: {error}") from error
        raise


def rows(content, name):
    """Yields (place, row or BadRow) of a file's bytes; `name` ends in its suffixes. Raises BadFile, MissingPackage.

    A place counts lines, entries or rows from 1.
    """
    name = name.lower()
    for suffix in PACKED:
        if name.endswith(suffix):
            content, name = unpacked(content, suffix), name.removesuffix(suffix)
    if name.endswith(".parquet"):
        yield from _parquet(content)
    elif name.endswith(".txt"):
        yield 1, {"text": content.decode("utf-8-sig", errors="strict")}
    elif name.endswith(".json"):
        yield from _entries(content)
    elif name.endswith(".jsonl"):
        yield from _lines(content)
    else:
        raise BadFile(f"expected {', '.join(SUFFIXES)}, or one of these with .gz or .zst behind it")


def _parse(text):
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow(f"no valid JSON: {error}")
    return row if isinstance(row, dict) else BadRow("no JSON object")


def _lines(content):
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield number, _parse(line)


def _entries(content):
    """A list of objects, one object, or lines of them under the wrong name."""
    try:
        whole = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        lines = list(_lines(content))
        if lines and isinstance(lines[0][1], dict):
            yield from lines
            return
        raise BadFile(f"no valid JSON: {error}") from error
    if isinstance(whole, dict):
        whole = whole.get("data", whole.get("rows", [whole]))
    if not isinstance(whole, list):
        raise BadFile("neither a list of objects nor an object")
    for number, row in enumerate(whole, 1):
        yield number, row if isinstance(row, dict) else BadRow("no JSON object")


def _parquet(content):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage("pyarrow", ".parquet files need it") from error
    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise BadFile(f"not a sound .parquet file: {error}") from error


def _without_nulls(row):
    return {key: value for key, value in row.items() if value is not None}


def _decoded(value, what):
    """A column that should be a list, also where it is JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow(f"'{what}' is text that is no JSON") from error
    return value


def _call(call):
    """A tool call with its arguments as an object."""
    if not isinstance(call, dict):
        raise BadRow("a tool call is no object")
    call = _without_nulls(call)
    inner = _without_nulls(call["function"]) if isinstance(call.get("function"), dict) else call
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise BadRow("the arguments of a tool call are no JSON") from error
    elif isinstance(arguments, dict):
        arguments = _without_nulls(arguments)
    inner = {**inner, "arguments": {} if arguments is None else arguments}
    return {**call, "function": inner} if "function" in call else inner


def _message(message, number):
    if not isinstance(message, dict):
        raise BadRow(f"message {number} is no object")
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "role" not in message and "from" in message:
        message = _shared(message)
    if not isinstance(message.get("role"), str):
        raise BadRow(f"message {number} has no role")
    if message.get("tool_calls"):
        calls = _decoded(message["tool_calls"], "tool_calls")
        if not isinstance(calls, list):
            raise BadRow(f"message {number}: 'tool_calls' is no list")
        message["tool_calls"] = [_call(call) for call in calls]
    elif message.get("content") is None:
        message["content"] = ""
    if not isinstance(message["content"] if "content" in message else "", (str, list, type(None))):
        raise BadRow(f"message {number}: 'content' is neither text nor parts")
    if isinstance(message.get("content"), list):
        message["content"] = [_without_nulls(part) if isinstance(part, dict) else part for part in message["content"]]
    return message


def _shared(turn):
    """A turn of ShareGPT as a message."""
    said, value = str(turn["from"]).lower(), turn.get("value", "")
    rest = {key: part for key, part in turn.items() if key not in ("from", "value", "weight", "content")}
    if said == "function_call":
        calls = _decoded(value, "function_call")
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": None,
                "tool_calls": [{"type": "function", "function": call} for call in calls], **rest}
    return {"role": _ROLES.get(said, said), "content": value, **rest}


def _messages(value, what):
    value = _decoded(value, what)
    if not isinstance(value, list) or not value:
        raise BadRow(f"'{what}' is no list of messages")
    return [_message(message, number) for number, message in enumerate(value, 1)]


def _tools(row):
    tools = _decoded(row.get("tools", row.get("functions")), "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("'tools' is no list of objects")
    if "tools" not in row:  # as OpenAI once wrote them
        return [{"type": "function", "function": tool} for tool in tools]
    return tools


def _text(row, key):
    value = row.get(key, "")
    if not isinstance(value, str):
        raise BadRow(f"'{key}' is not text")
    return value


def _alpaca(row):
    messages = [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow("'history' is no list of questions and answers")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = "\n".join(filter(None, (_text(row, "instruction"), _text(row, "input"))))
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": _text(row, "output")}]


def conversation_of(row):
    """The messages of a row, checked and in the form of `messages`; None where it holds none. Raises BadRow."""
    row = _without_nulls(row)
    if "messages" in row:
        return _messages(row["messages"], "messages")
    for key in ("conversations", "conversation"):
        if key not in row:
            continue
        messages = _messages(row[key], key)
        if row.get("system") and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": _text(row, "system")}, *messages]
        return messages
    if isinstance(row.get("prompt"), list):
        both = [*row["prompt"], *row["completion"]] if isinstance(row.get("completion"), list) else row["prompt"]
        return _messages(both, "prompt")
    return _alpaca(row) if "prompt" not in row and "instruction" in row else None


def document_of(row, template):
    """(text, whether it is a chat that the template wrote) of a row. Raises BadRow.

    A conversation needs a template; Alpaca's rows become plain text without one.
    """
    row = _without_nulls(row)
    messages = conversation_of(row)
    if messages is None:
        if "prompt" in row or "completion" in row:
            if not ("prompt" in row and "completion" in row):
                raise BadRow("'prompt' needs 'completion' beside it")
            return _text(row, "prompt") + _text(row, "completion"), False
        if "text" not in row:
            raise BadRow("no 'messages', 'conversations', 'prompt' with 'completion', 'instruction' or 'text'")
        return _text(row, "text"), False
    if not template:
        if "instruction" in row:
            return "\n".join(message["content"] for message in messages), False
        raise BadRow("the model has no chat template")
    settings = row.get("chat_template_kwargs")
    try:
        return template.render(messages, tools=_tools(row), documents=row.get("documents"),
                               **(settings if isinstance(settings, dict) else {})), True
    except ChatTemplateError as error:
        raise BadRow(f"the chat template refuses it: {error}") from error
