"""Rows of text files as people have them, to documents. Imports the standard library; .parquet and .zst need more.

A row is what a line of .jsonl, an entry of a .json list or a row of .parquet holds. Columns that are null
count as absent. It is read by the first of these that it has:

    messages                      a conversation (also as JSON text), with tools and documents
    conversations                 ShareGPT: from and value, or role and content; system and tools beside it
    prompt, completion            text, or messages; input and output as messages
    prompt, chosen                preferences: the text or messages that were preferred; chosen may hold the prompt
    instruction, input, output    Alpaca, with system and history; Dolly: context for input, response for output
    question, answer              also query and problem, response and solution
    text
    content                       as text, where neither a role nor an answer stands beside it, nor another text

A row whose answer is not found, or that says two things where one is read, is a BadRow: no half of it is a document.
"""
import gzip
import json
import pathlib
import shlex
import zlib

from .chat_template import ChatTemplateError, MissingPackage, joined_text
from .errors import OscarError

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
PACKED = (".gz", ".zst")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
          "observation": "tool", "function_response": "tool", "function": "tool"}
_OLD_ROLES = {"human", "gpt", "chatgpt", "bot", "function"}  # that templates pass by
_MARK = "oscarint2message{}mark"  # a word that no template and no message has
_ROLES_OF_TEMPLATES = {"system", "user", "assistant", "tool"}
_ASKING = {"system", "developer", "user", "tool"}  # roles whose words are no answer
# Keys of a tool call that has no arguments.
_OF_CALLS = {"name", "id", "type", "index", "function", "tool_call_id", "description", "strict"}
# Columns that ask, that stand beside the question, and that answer.
_ASKED = ("instruction", "question", "query", "problem", "prompt")
_BESIDE = ("input", "context")
_ANSWERS = ("output", "response", "completion", "chosen", "solution", "answer")
_CHOICES = ("choices", "options")
_SYSTEM = ("system", "system_prompt")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_KNOWN = ("no 'messages', 'conversations', 'conversation', 'prompt' with 'completion' or 'chosen', 'instruction', 'question', 'query' or "
          "'problem' with 'output', 'response', 'solution' or 'answer', 'text' or 'content'")
_IDS = {"input_ids", "token_ids", "tokens", "ids"}  # that are read of other files
_MAGIC = ((b"\x1f\x8b", "gzip", ".gz"), (b"\x28\xb5\x2f\xfd", "Zstandard", ".zst"))


class BadRow(OscarError):
    """A row that holds no document; its text says why."""


class BadFile(OscarError):
    """A file that cannot be read at all."""


def unpacked(content, suffix):
    """The bytes of a .gz or .zst file, of all its parts. Raises BadFile, also where its end is missing; MissingPackage."""
    try:
        if not content:
            raise EOFError("it is empty")
        return gzip.decompress(content) if suffix == ".gz" else _zstd(content)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadFile(f"not a sound {suffix} file: {error}") from error
    except Exception as error:
        if type(error).__name__ == "ZstdError":
            raise BadFile(f"not a sound {suffix} file: {error}") from error
        raise


def _zstd(content):
    """All frames, one behind another."""
    try:
        from compression import zstd  # Python 3.14; it raises where the end is missing
        return zstd.decompress(content)
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError as error:
        raise MissingPackage("zstandard", ".zst files need it") from error
    block, parts, frame = 1 << 20, [], None  # blocks: what is behind a frame is copied
    for at in range(0, len(content), block):
        rest = content[at:at + block]
        while rest:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(rest))
            rest, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("its end is missing")
    return b"".join(parts)


def _iconv(encoding, name):
    """The command that writes a file of this encoding anew."""
    stem, dot, kind = pathlib.PurePath(name).name.partition(".")
    anew = str(pathlib.PurePath(name).with_name(f"{stem}-utf8{dot}{kind}"))
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(name)} > {shlex.quote(anew)}"


def _require_lines(content, name, packed):
    """Raises BadFile for packed bytes and for a list of objects under the name of text or lines; `packed`: ".gz" that was behind it."""
    for magic, packer, suffix in () if packed else _MAGIC:
        if content.startswith(magic):
            raise BadFile(f"the file is packed with {packer}; say so in its name: mv {shlex.quote(name)} {shlex.quote(name + suffix)}")
    if name.lower().endswith(".jsonl") and content[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        inner = content.strip(b"\xef\xbb\xbf \t\r\n")
        if inner.endswith(b"]") and inner[1:-1].strip()[:1] == b"{" and inner[1:-1].strip()[-1:] == b"}":
            raise BadFile(f"the file holds a list, not lines; name it .json: mv {shlex.quote(name + packed)} "
                          f"{shlex.quote(str(pathlib.PurePath(name).with_suffix('.json')) + packed)}")


def _require_utf8(content, name):
    """Raises BadFile for UTF-16, by its byte order mark or by what ASCII becomes in it."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "UTF-16"
    elif len(content) > 1 and 0 in content[:2] and any(content[:2]):
        encoding = "UTF-16LE" if content[1] == 0 else "UTF-16BE"
    else:
        return
    raise BadFile(f"the text is {encoding}, expected UTF-8; write it anew: {_iconv(encoding, name)}")


def rows(content, name):
    """Yields (place, row or BadRow) of a file's bytes; `name` ends in its suffixes. Raises BadFile, MissingPackage.

    A place counts lines, entries or rows from 1.
    """
    shown, name, packed = name, name.lower(), ""
    for suffix in PACKED:
        if name.endswith(suffix):
            content, name = unpacked(content, suffix), name.removesuffix(suffix)
            shown, packed = shown[:len(name)], shown[len(name):] + packed
    if not name.endswith(".parquet"):
        _require_lines(content, shown, packed)
        _require_utf8(content, shown)
    if name.endswith(".parquet"):
        yield from _parquet(content)
    elif name.endswith(".txt"):
        try:
            yield 1, {"text": content.decode("utf-8-sig", errors="strict")}
        except UnicodeDecodeError as error:
            raise BadFile(f"{error}; if it is Latin-1: {_iconv('LATIN1', shown)}") from error
    elif name.endswith(".json"):
        yield from _entries(content, shown)
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


def _entries(content, name):
    """A list of objects, one object, or lines of them under the wrong name."""
    try:
        whole = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        lines = list(_lines(content))
        if lines and isinstance(lines[0][1], dict):
            yield from lines
            return
        latin_1 = f"; if it is Latin-1: {_iconv('LATIN1', name)}" if isinstance(error, UnicodeDecodeError) else ""
        raise BadFile(f"no valid JSON: {error}{latin_1}") from error
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
    """A tool call with its arguments as an object; Llama 3 calls them parameters."""
    if not isinstance(call, dict):
        raise BadRow("a tool call is no object")
    call = _without_nulls(call)
    inner = call
    while isinstance(inner.get("function"), dict):
        inner = _without_nulls(inner["function"])
    if not isinstance(inner.get("name"), str) or not inner["name"].strip():
        raise BadRow(f"a tool call has no 'name'; {_has(inner, 'it')}")
    if not {"arguments", "parameters"} & inner.keys() and not inner.keys() <= _OF_CALLS:
        raise BadRow(f"a tool call has no 'arguments'; {_has(inner, 'it')}")
    arguments = inner.get("arguments", inner.get("parameters"))
    if inner.get("parameters", arguments) != arguments:
        raise BadRow("a tool call has other 'parameters' than 'arguments'")
    inner.pop("parameters", None)
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
        message = _shared(message, number)
    if not isinstance(message.get("role"), str):
        raise BadRow(f"message {number} has no role")
    message["role"] = _ROLES[message["role"]] if message["role"] in _OLD_ROLES else message["role"]
    if "value" in message:
        value = message.pop("value")
        if message.get("content", value) not in (None, value):
            raise BadRow(f"message {number}: 'content' and 'value' differ")
        message["content"] = value
    old_call = message.pop("function_call", None)  # as OpenAI once wrote them
    if old_call:
        if message.get("tool_calls"):
            raise BadRow(f"message {number}: 'function_call' and 'tool_calls'")
        message["tool_calls"] = [{"type": "function", "function": _decoded(old_call, "function_call")}]
    if message.get("tool_calls"):
        calls = _decoded(message["tool_calls"], "tool_calls")
        if not isinstance(calls, list):
            raise BadRow(f"message {number}: 'tool_calls' is no list")
        message["tool_calls"] = [_call(call) for call in calls]
    elif message.get("content") is None:
        if not any(isinstance(message.get(key), str) for key in ("reasoning_content", "thinking")):
            raise BadRow(f"message {number} has no content")
        message["content"] = ""
    if not isinstance(message.get("content"), (str, list, type(None))):
        raise BadRow(f"message {number}: 'content' is neither text nor parts")
    if isinstance(message.get("content"), list):
        message["content"] = [_without_nulls(part) if isinstance(part, dict) else part for part in message["content"]]
    return message


def _shared(turn, number):
    """A turn of ShareGPT as a message."""
    said = str(turn["from"]).lower()
    rest = {key: part for key, part in turn.items() if key not in ("from", "weight")}
    if said != "function_call":
        return {"role": _ROLES.get(said, said), **rest}
    if "value" not in rest:
        raise BadRow(f"message {number} has no content")
    calls = _decoded(rest.pop("value"), "function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call} for call in calls], **rest}


def _messages(value, what):
    value = _decoded(value, what)
    if not isinstance(value, list) or not value:
        raise BadRow(f"'{what}' is no list of messages")
    return [_message(message, number) for number, message in enumerate(value, 1)]


def _answers(messages):
    """Whether anybody answers among them: with words, thoughts or a call."""
    return any(message["role"] not in _ASKING and
               any(_says(message.get(key)) for key in ("content", "tool_calls", "reasoning_content", "thinking"))
               for message in messages)


def _tools(row):
    tools = _decoded(row.get("tools", row.get("functions")), "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("'tools' is no list of objects")
    if "tools" not in row:  # as OpenAI once wrote them
        return [{"type": "function", "function": tool} for tool in tools]
    return tools


def _has(row, what="the row"):
    """What columns a row has, for an error: the first few, and how many more."""
    shown = [f"'{key}'" for key in row if len(key.encode(errors="replace")) <= 40][:8]
    more = f"{' and ' if shown else ''}{len(row) - len(shown)} more" if len(row) > len(shown) else ""
    ids = " (token ids are read from .npy and .h5)" if _IDS & row.keys() else ""
    return f"{what} has {', '.join(shown)}{more}{ids}" if row else f"{what} has nothing"


def _text(row, key):
    value = row.get(key, "")
    if not isinstance(value, str):
        raise BadRow(f"'{key}' is not text")
    return value


def _says(value):
    return bool(value.strip()) if isinstance(value, str) else value not in (None, [], {})


def _only(row, columns):
    """(column, value) of the only one of these that says something, or of the text that holds what the others say; (None, None)
    without one."""
    found = [(key, row[key]) for key in columns if _says(row.get(key))]
    for key, value in found:
        if all(other == value or isinstance(value, str) and not isinstance(other, (list, dict)) and str(other).strip() in value
               for _, other in found):
            return key, value
    if found:
        raise BadRow(" and ".join(f"'{key}'" for key, _ in found) + " say different things")
    return None, None


def _answer(row):
    """(column, value) of the answer; that which a row's form names stands before others."""
    for asked, answer in (("prompt", "completion"), ("instruction", "output")):
        if _says(row.get(asked)) and _says(row.get(answer)):
            return answer, row[answer]
    return _only(row, _ANSWERS)


def _same(message):
    said = message.get("content")
    return message["role"], said.strip() if isinstance(said, str) else said


def _answered(asked, row):
    """The messages of a question, and behind them those of the row's answer, which may hold the question too."""
    key, answer = _answer(row)
    if key is None:
        raise BadRow("no answer: none of " + ", ".join(f"'{column}'" for column in _ANSWERS) + f"; {_has(row)}")
    if isinstance(answer, str):
        return [*asked, {"role": "assistant", "content": answer}]
    if not isinstance(answer, (list, dict)):
        raise BadRow(f"'{key}' is not text")
    answer = _messages(answer if isinstance(answer, list) else [answer], key)
    if not _answers(answer):
        raise BadRow(f"'{key}' holds no answer")
    if answer[0]["role"] not in ("system", "user"):
        if not any(message["role"] == "user" for message in asked):
            raise BadRow(f"no question beside '{key}'")
        return [*asked, *answer]
    systems = [message for message in asked if message["role"] == "system"]
    turns = list(map(_same, asked[len(systems):]))
    spoken = [message for message in answer if message["role"] != "system"]
    if list(map(_same, spoken[:len(turns)])) != turns:
        raise BadRow(f"'{key}' begins otherwise than the question beside it")
    return answer if answer[0]["role"] == "system" else [*systems, *answer]


def _question(row, answer):
    """(column, text) of what is asked; the column is None where only those of _BESIDE ask."""
    key, asked = _only(row, _ASKED)
    if key is None and "prompt" in row:
        key, asked = "prompt", row["prompt"]
    if asked is not None and not isinstance(asked, str):
        raise BadRow(f"'{key}' is not text")
    if key == "prompt" and isinstance(answer, str) and asked.rstrip().endswith(answer.strip()):
        inner = _only(row, _ASKED[:-1])
        key, asked = inner if inner[0] else (key, asked)  # else the prompt is the whole, as a text
    for column in _CHOICES:
        if _says(row.get(column)):
            raise BadRow(f"'{column}' beside a question is not read")
    more = [text for text in (_text(row, column) for column in _BESIDE) if text and text not in (asked or "")]
    return key, "\n".join(filter(None, [asked, *more]))


def _system(row):
    key, system = _only(row, _SYSTEM)
    if system is not None and not isinstance(system, str):
        raise BadRow(f"'{key}' is not text")
    return [{"role": "system", "content": system}] if system else []


def _under_system(messages, row):
    """The messages behind what the row's column says to the system."""
    system, first = _system(row), messages[0]
    if not system or first["role"] not in ("system", "developer"):
        return [*system, *messages]
    if system[0]["content"].strip() not in str(first.get("content")):
        raise BadRow("the column of the system and the first message say different things")
    return messages


def _pair(row):
    """(messages, None) or (None, text) of a row of a question and its answer: two texts that follow each other are one."""
    column, answer = _answer(row)
    before = _system(row)
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow("'history' is no list of questions and answers")
        before += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    key, asked = _question(row, answer)
    if column is None and key == "prompt":
        raise BadRow("'prompt' needs 'completion' beside it")
    if column in ("completion", "chosen") and isinstance(answer, str) and key == "prompt":
        whole = column == "chosen" and answer.startswith(asked)
        if asked == row[key] and not before:
            return None, answer if whole else asked + answer
        if whole:
            raise BadRow("'chosen' begins with 'prompt', and other columns stand beside them")
    return _answered([*before, {"role": "user", "content": asked}], row), None


def _whole_text(row):
    """The column text. Raises BadRow where 'content' says something else, or an answer, or what it answers, stands beside it
    alone."""
    text = _text(row, "text")
    content = row.get("content")
    if isinstance(content, str) and text.strip() and content.strip() not in text:
        raise BadRow("'text' and 'content' say different things")
    if any(_says(row.get(key)) for key in _ANSWERS):
        for key in (*_ASKED, *_BESIDE, *_ANSWERS):
            value = row.get(key, "")
            if isinstance(value, (list, dict)) and value or isinstance(value, str) and value.strip() not in text:
                raise BadRow(f"'text' does not hold what '{key}' says")
    return text


def _settings(row):
    """What a row sets of its chat template."""
    settings = row.get("chat_template_kwargs")
    return settings if isinstance(settings, dict) else {}


def _read(row):
    """(messages, None) or (None, text) of a row without nulls."""
    for key in filter(row.__contains__, _CONVERSATIONS):
        messages = _under_system(_messages(row[key], key), row)
        if messages[-1]["role"] != "assistant" and _answer(row)[0]:
            return _answered(messages, row), None
        if not _answers(messages) and _settings(row).get("add_generation_prompt") is not True:
            raise BadRow(f"'{key}' holds no answer")
        return messages, None
    for key in ("prompt", "input"):
        if isinstance(row.get(key), list) and (key == "prompt" or not any(row.get(column) for column in ("text", *_ASKED))):
            asked = _under_system(_messages(row[key], key), row)
            if _answer(row)[0] is None:
                raise BadRow(f"'{key}' needs 'completion' beside it")
            return _answered(asked, row), None
    if "text" in row and not any(key in row for key in ("prompt", "completion", "instruction")):
        return None, _whole_text(row)
    if any(key in row for key in (*_ASKED, "input")):
        return _pair(row)
    if isinstance(row.get("chosen"), list):
        return _answered(_system(row), row), None
    if isinstance(row.get("chosen"), str) and set(row) <= {"chosen", "rejected"}:
        return None, row["chosen"]
    if "completion" in row:
        raise BadRow("'prompt' needs 'completion' beside it")
    if "content" in row and not any(key in row for key in ("role", "from", *_ANSWERS)):
        return None, _text(row, "content")
    raise BadRow(f"{_KNOWN}; {_has(row)}")


def _require_unknown_roles(messages, text, render):
    """Raises BadRow for a message that the template passes by, as many do with roles that they do not know.

    Its content may stand in the text by chance ("ok"), so a mark is rendered in its place.
    """
    unknown = {number: message for number, message in enumerate(messages, 1)
               if message["role"] not in _ROLES_OF_TEMPLATES and _says(message.get("content"))}
    if not unknown:
        return
    marked = [{**message, "content": _MARK.format(number)} if number in unknown else message
              for number, message in enumerate(messages, 1)]
    try:
        shown = render(marked)
    except ChatTemplateError:  # it takes some contents alone: those themselves are looked for
        shown = None
    for number, message in unknown.items():
        if shown is not None:
            found = _MARK.format(number) in shown
        else:
            said = joined_text(message["content"])
            found = said.strip() in text or json.dumps(said, ensure_ascii=False)[1:-1] in text
        if not found:
            raise BadRow(f"the chat template leaves out message {number}, of role '{message['role']}'")


def document_of(row, template):
    """(text, whether it is a chat that the template wrote) of a row. Raises BadRow.

    A conversation needs a template; Alpaca's rows and other questions with answers become plain text without one.
    """
    row = _without_nulls(row)
    messages, text = _read(row)
    if messages is None:
        return text, False
    if not template:
        columns = (*_ASKED, *_BESIDE, *_ANSWERS)
        if not any(key in row for key in _CONVERSATIONS) and not any(isinstance(row.get(key), (list, dict)) for key in columns):
            return "\n".join(message["content"] for message in messages), False
        raise BadRow("the model has no chat template")

    def render(turns):
        return template.render(turns, tools=_tools(row), documents=row.get("documents"), **_settings(row))

    try:
        text = render(messages)
    except ChatTemplateError as error:
        raise BadRow(f"the chat template refuses it: {error}") from error
    _require_unknown_roles(messages, text, render)
    return text, True
