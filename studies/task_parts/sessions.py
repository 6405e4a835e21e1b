"""Agent sessions of 20 turns: each turn asks for one tool call, whose arguments often stand in results of earlier turns."""
import json
import random
import re

from . import rules

TURNS = 20
SITES = ("north yard", "south yard", "river depot", "hill depot")
CARRIERS = ("Arrow", "Bluebird", "Comet", "Dromedary")
CURRENCIES = ("EUR", "USD", "GBP", "JPY")
REASONS = ("damaged", "too late", "wrong size", "ordered twice")


def _tool(name: str, about: str, **parameters) -> dict:
    return {"type": "function", "function": {"name": name, "description": about, "parameters": {
        "type": "object", "properties": {key: {"type": kind, "description": words} for key, (kind, words) in parameters.items()},
        "required": list(parameters)}}}


TOOLS = [
    _tool("find_item", "Looks an item up by what it is and its colour.",
          kind=("string", "What it is, one word"), colour=("string", "Its colour")),
    _tool("get_stock", "Says how many pieces of an item a site has.",
          item_id=("string", "Such as IT-12345"), site=("string", "Name of the site")),
    _tool("get_price", "Says the price of an item.", item_id=("string", "Such as IT-12345"), currency=("string", "Three letters")),
    _tool("reserve", "Reserves pieces of an item at a site.",
          item_id=("string", "Such as IT-12345"), quantity=("integer", "Number of pieces"), site=("string", "Name of the site")),
    _tool("ship", "Ships what was reserved.", reservation_id=("string", "Such as RS-1234567"), carrier=("string", "Name of the carrier"),
          express=("boolean", "Whether it is urgent")),
    _tool("cancel", "Cancels a reservation.", reservation_id=("string", "Such as RS-1234567"), reason=("string", "Why")),
    _tool("track", "Says where a shipment is.", shipment_id=("string", "Such as SH-123456")),
    _tool("add_note", "Adds a note to an item's file.", item_id=("string", "Such as IT-12345"), text=("string", "The note, word for word")),
]
SYSTEM = ("You keep the stock of a warehouse. For each request call exactly one tool, with the exact ids of earlier results. "
          "Never ask back, and never answer without a tool call.")


class _Session:
    """Ids that a session has made so far, by kind, with the step that made each."""

    def __init__(self, generator: random.Random):
        self.random, self.ids, self.step = generator, {"IT": [], "RS": [], "SH": []}, 0

    def new(self, kind: str) -> str:
        digits = {"IT": 5, "RS": 7, "SH": 6}[kind]
        made = f"{kind}-{self.random.randrange(10 ** (digits - 1), 10 ** digits)}"
        self.ids[kind].append((self.step, made))
        return made

    def earlier(self, kind: str) -> tuple:
        return self.random.choice(self.ids[kind])

    def turn(self) -> tuple:
        """(request, tool, arguments, result) of the next step."""
        self.step += 1
        choose, kinds = self.random.choice, ["find_item"]
        if self.ids["IT"]:
            kinds += ["get_stock", "get_price", "reserve", "add_note"]
        if self.ids["RS"]:
            kinds += ["ship", "cancel"]
        if self.ids["SH"]:
            kinds += ["track"]
        tool = choose(kinds if self.step > 2 else kinds[:1])
        if tool == "find_item":
            arguments = {"kind": choose(rules.WORDS), "colour": choose(("amber", "black", "green", "ivory", "violet"))}
            words = f"Find the {arguments['colour']} {arguments['kind']}."
            result = {"item_id": self.new("IT"), **arguments, "weight_kg": self.random.randint(1, 90)}
        elif tool in ("get_stock", "get_price", "reserve", "add_note"):
            step, item = self.earlier("IT")
            words, more, result = self._of_item(tool)
            arguments = {"item_id": item, **more}
            words = f"{words} the item that step {step} found."
        elif tool in ("ship", "cancel"):
            step, reservation = self.earlier("RS")
            if tool == "ship":
                more = {"carrier": choose(CARRIERS), "express": choose((True, False))}
                words = f"Ship the reservation of step {step} with {more['carrier']}, {'express' if more['express'] else 'not express'}."
                result = {"shipment_id": self.new("SH"), "days": self.random.randint(1, 20)}
            else:
                more = {"reason": choose(REASONS)}
                words, result = f"Cancel the reservation of step {step}. The reason is: {more['reason']}", {"cancelled": True}
            arguments = {"reservation_id": reservation, **more}
        else:
            step, shipment = self.earlier("SH")
            words, arguments, result = f"Where is the shipment of step {step}?", {"shipment_id": shipment}, {"place": choose(SITES)}
        return words, tool, arguments, result

    def _of_item(self, tool: str) -> tuple:
        choose = self.random.choice
        if tool == "get_stock":
            site = choose(SITES)
            return f"Look up the stock at the {site} of", {"site": site}, {"pieces": self.random.randint(0, 900)}
        if tool == "get_price":
            currency = choose(CURRENCIES)
            return f"Say the price in {currency} of", {"currency": currency}, {"price": self.random.randint(5, 9000), "currency": currency}
        if tool == "reserve":
            site, quantity = choose(SITES), self.random.randint(1, 60)
            return f"At the {site}, reserve {quantity} pieces of", {"quantity": quantity, "site": site}, {"reservation_id": self.new("RS")}
        note = f"{choose(rules.VERBS)} the {choose(rules.WORDS)} before the {choose(rules.WORDS)}"
        return f"Add the note \"{note}\" to the file of", {"text": note}, {"notes": self.random.randint(1, 9)}


def _log(generator: random.Random) -> list:
    """What a real tool says beside the result: rows of other ids."""
    choose = generator.choice
    return [f"{choose(rules.VERBS)} {choose(rules.WORDS)} {choose(('IT', 'RS', 'SH'))}-{generator.randint(10000, 9999999)} ok"
            for _ in range(generator.randint(4, 12))]


def session_prompts(generator: random.Random) -> list:
    """One prompt a turn. The session goes on with the expected call and its result, whatever the model said, so that all caches
    and all samples see the same prompts."""
    session, messages, prompts = _Session(generator), [{"role": "system", "content": SYSTEM}], []
    for step in range(1, TURNS + 1):
        words, tool, arguments, result = session.turn()
        messages.append({"role": "user", "content": f"Step {step}: {words}"})
        call = {"name": tool, "arguments": arguments}
        prompts.append({"messages": list(messages), "tools": TOOLS, "max_tokens": 160, "expected": call})
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "content": json.dumps({"step": step, "result": result, "log": _log(generator)})})
        messages.append({"role": "assistant", "content": f"Step {step} is done."})
    return prompts


def call_of(answer: str):
    """The one call of an answer, {"name", "arguments"}; None where there is none or more than one."""
    found = re.findall(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", answer, re.DOTALL)
    found = found or re.findall(r"```(?:json)?\n(.*?)\n?(?:```|$)", answer, re.DOTALL) or [answer]
    try:
        (text,) = found
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return None
    return call


def is_valid(answer: str) -> bool:
    """A call of a tool that there is, with the arguments that it takes, each of its type."""
    call = call_of(answer)
    tool = next((t["function"]["parameters"] for t in TOOLS if call and t["function"]["name"] == call["name"]), None)
    kinds = {"string": str, "integer": int, "boolean": bool}
    return bool(tool) and set(call["arguments"]) == set(tool["required"]) and all(
        type(value) is kinds[tool["properties"][key]["type"]] for key, value in call["arguments"].items())


def score_session(answer: str, expected: dict) -> float:
    return float(is_valid(answer) and call_of(answer) == expected)
