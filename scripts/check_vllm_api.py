#!/usr/bin/env python3
"""Checks that a vLLM has every name, parameter and attribute that the plugin uses of it.

    scripts/check_vllm_api.py [--adapter adapter_0_33] TREE_OR_WHEEL ...

Reads sources only, ours and theirs: of ours what they use, of theirs whether it is there. Nothing is
imported, so a wheel of another machine's or a checkout will do. A folder is one that holds vllm/.
Found are imported names; attributes of their objects, whose types follow from annotations; parameters
of what is called; and of each method that replaces or overrides one of theirs, that it takes what theirs
does. What has no type there is not checked: tests on an engine do the rest.
"""
import argparse
import ast
import pathlib
import re
import sys
from dataclasses import dataclass

from vllm_sources import (Defined, Many, Namespace, Object, Signature, Sources, Vllm, imports,
                          is_class)

PLUGIN = pathlib.Path(__file__).resolve().parent.parent / "python" / "oscar_int2" / "vllm"
# Parameters of ours that hold objects of vLLM's, in functions that override nothing.
PARAMETERS = {
    "config": "vllm.config.vllm.VllmConfig",
    "common": "vllm.v1.attention.backend.CommonAttentionMetadata",
    "request": "vllm.v1.request.Request",
    "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
}
# The same where a name says too little: (function, parameter).
OTHERS = {
    ("builders", "runner"): "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    ("_sink", "blocks"): "list[vllm.v1.core.kv_cache_utils.KVCacheBlock]",
    ("defaults", "args"): "vllm.engine.arg_utils.EngineArgs",
}
# Attributes that hold more than they are annotated as: our specs are of this class.
NARROWER = {"kv_cache_spec": "vllm.v1.kv_cache_interface.FullAttentionSpec"}

# Names of our classes that vLLM has to know; None: all.
THEIRS = {
    "CacheShape": None, "OscarBackend": None, "SizedSpec": None,
    "OscarMetadataBuilder": ("build", "reorder_batch_threshold", "_cudagraph_support"),
    "OscarAttention": ("process_weights_after_loading", "supports_quant_query_input"),
    "PrefixManager": ("cache_blocks", "find_longest_cache_hit"),
}
# Of our specs: the fields that vLLM's do not have.
SPECS = {"Int2Spec": ("windows",), "SizedSpec": ("windows", "chunk_bytes")}


@dataclass(frozen=True)
class Words:
    """A loop's variable that is one of these texts."""

    all: tuple


class Uses(ast.NodeVisitor):
    """Walks one file of ours and notes what it uses: self.checked, and what is wrong: self.problems."""

    def __init__(self, vllm, path, adapter):
        self.vllm, self.path, self.checked, self.problems = vllm, path, set(), []
        self.adapter = adapter
        self.tree = ast.parse(path.read_text())
        self.scopes, self.owner, self.function = [{}], None, None
        self.ours = {}  # of the class that is visited: its own names
        self.replaced = {}  # functions that make a method in place of one of vLLM's: its Defined
        self.visit(self.tree)

    def note(self, what, node, problem=None):
        self.checked.add(what)
        if problem:
            self.problems.append(f"{self.path.name}:{node.lineno}: {what} {problem}")

    # What names stand for.

    def bind(self, target, value):
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = value

    def lookup(self, name):
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def visit_ImportFrom(self, node):
        for name, (module, attribute) in imports(node, "oscar_int2.vllm"):
            if module.split(".")[0] != "vllm":
                continue
            found = self.vllm.find(module, attribute)
            self.note(f"{module}.{attribute}", node, None if found else "is not there")
            self.scopes[-1][name] = [d for d in found if d]

    # Classes and functions of ours.

    def visit_ClassDef(self, node):
        bases = [self.evaluate(base) for base in node.bases]
        theirs = next((b for b in bases if isinstance(b, Defined)), None)
        if theirs is None and any(getattr(b, "id", "") == "Int2Spec" for b in node.bases):
            theirs = self.vllm.one("vllm.v1.kv_cache_interface.FullAttentionSpec")
        if theirs is None and node.name == "CacheShape":  # a base of our backend, beside vLLM's
            theirs = self.vllm.one("vllm.v1.attention.backend.AttentionBackend")
        outer = self.owner, self.ours
        self.owner, self.ours = theirs, own_names(node)
        if theirs is not None:
            for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
                _, kind = self.vllm.member(theirs, method.name)
                if isinstance(kind, Defined) and isinstance(kind.node, ast.FunctionDef):
                    why = Signature(method, True).takes_less_than(Signature(kind.node, True))
                    self.note(f"{kind}()", method,
                              why and f"is overridden by {node.name}.{method.name}, which {why}")
            self._must_be_theirs(node, theirs)
        self.generic_visit(node)
        self.owner, self.ours = outer

    def _must_be_theirs(self, node, theirs):
        known = THEIRS.get(node.name, ())
        own = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
        for name in sorted(self.ours - set(own)) if known is None else known:
            there, _ = self.vllm.member(theirs, name)
            self.note(f"{theirs}.{name}", node,
                      None if there else f"is not there: that of {node.name} is for nothing")
        if node.name != "CacheShape":
            shape = shape_names(self.adapter) if node.name == "OscarBackend" else ()
            for name in self.vllm.abstract(theirs):
                self.note(f"{theirs}.{name} is abstract", node, None if name in self.ours
                          or name in shape else f"and {node.name} does not define it")

    def visit_FunctionDef(self, node):
        scope, outer = {}, self.function
        arguments = [a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
        for name in arguments:
            scope[name] = self._parameter(node, name)
        if arguments and arguments[0] == "self" and self.owner is not None:
            scope["self"] = Object(self.owner)
        if self.function in self.replaced and arguments[:1] == ["self"]:
            method = self.replaced[self.function]
            scope |= {name: self._theirs(method, name) for name in arguments}
            scope |= {"self": Object(method.owner), "original": method}
            why = Signature(node, True).takes_less_than(Signature(method.node, True))
            self.note(f"{method}()", node, why and f"is replaced by one which {why}")
        self.scopes.append(scope)
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) \
                    == "replace" and len(call.args) == 3 and isinstance(call.args[1], ast.Constant):
                self._replaced(call, node)
        self.function = node.name
        for part in node.body:
            self.visit(part)
        self.function = outer
        self.scopes.pop()

    def _replaced(self, call, function):
        """replace(owner, "method", make)"""
        self.scopes.append({})
        for part in ast.walk(function):
            if isinstance(part, ast.ImportFrom):
                for name, (module, attribute) in imports(part, "oscar_int2.vllm"):
                    if module.split(".")[0] == "vllm":
                        self.scopes[-1][name] = [d for d in self.vllm.find(module, attribute) if d]
        owner, name = self.evaluate(call.args[0]), call.args[1].value
        self.scopes.pop()
        if isinstance(owner, Namespace):  # a function of a module
            found = self.vllm.find(owner.module.name, name)
            self.note(f"{owner.module.name}.{name}", call, None if found else "is not there")
            return
        if not isinstance(owner, Defined):
            self.note(ast.unparse(call.args[0]), call, "is not there")
            return
        there, method = self.vllm.member(owner, name)
        self.note(f"{owner}.{name}", call, None if there else "is not there")
        if isinstance(method, Defined):
            self.replaced[call.args[2].id] = Defined(method.module, method.node, owner)

    def _parameter(self, function, name):
        if (function.name, name) in OTHERS:
            return self._dotted(OTHERS[function.name, name])
        if self.owner is not None:
            _, method = self.vllm.member(self.owner, function.name)
            if isinstance(method, Defined) and isinstance(method.node, ast.FunctionDef):
                return self._theirs(method, name)
        return self._dotted(PARAMETERS.get(name))

    def _dotted(self, dotted):
        if dotted is None:
            return None
        many = re.fullmatch(r"list\[(.*)\]", dotted)
        found = self.vllm.one(many[1] if many else dotted)
        if found is None:
            self.note(dotted, self.tree.body[0], "is not there")
            return None
        return Many(Object(found)) if many else Object(found)

    def _theirs(self, method, name):
        a = method.node.args
        known = [p.annotation for p in a.args + a.kwonlyargs if p.arg == name and p.annotation]
        return self.vllm.type_of(known[0], method.module) if known else None

    # Statements that bind names.

    def visit_Assign(self, node):
        value = node.value
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for one, part in zip(target.elts, value.elts):
                    self.bind(one, self.evaluate(part))
            elif isinstance(target, ast.Name):
                self.bind(target, self.evaluate(value))
        self.generic_visit(node)

    def visit_For(self, node):
        self._loop(node)
        self.generic_visit(node)

    def _loop(self, node):
        found = self.evaluate(node.iter)
        target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
        if isinstance(node.iter, ast.Tuple) and isinstance(node.target, ast.Tuple):
            names = [getattr(row.elts[0], "value", None) if isinstance(row, ast.Tuple) else None
                     for row in node.iter.elts]
            self.bind(target, Words(tuple(names)) if all(isinstance(n, str) for n in names) else None)
        else:
            self.bind(target, found.of if isinstance(found, Many) else None)

    def visit_If(self, node):
        """Behind isinstance(name, a class of ours) the name is no object of theirs."""
        test = node.test
        if isinstance(test, ast.Call) and getattr(test.func, "id", "") == "isinstance":
            self.visit(test)
            name, theirs = test.args[0], self.evaluate(test.args[1])
            self.scopes.append({getattr(name, "id", ""): theirs and self.evaluate(name)})
            for part in node.body:
                self.visit(part)
            self.scopes.pop()
            for part in node.orelse:
                self.visit(part)
        else:
            self.generic_visit(node)

    def _comprehension(self, node):
        self.scopes.append({})
        for generator in node.generators:
            self._loop(generator)
        self.generic_visit(node)
        value = self.evaluate(node.elt) if hasattr(node, "elt") else None
        self.scopes.pop()
        return Many(value)

    visit_GeneratorExp = visit_ListComp = visit_SetComp = visit_DictComp = _comprehension

    # Expressions.

    def evaluate(self, node):
        """Defined, Object, Many, Namespace or None."""
        if isinstance(node, ast.Name):
            found = self.lookup(node.id)
            return (found[0] if found else None) if isinstance(found, list) else found
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            if ast.unparse(node.value) == "sys.modules" and isinstance(node.slice, ast.Constant):
                return next(iter(self.vllm.find(node.slice.value, None)), None)
            found = self.evaluate(node.value)
            part = isinstance(node.slice, ast.Slice)
            return found.of if isinstance(found, Many) and not part else found
        if isinstance(node, ast.GeneratorExp):
            return self._comprehension(node)
        if isinstance(node, ast.IfExp):
            return self.evaluate(node.body)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            if name == "super" and self.owner is not None:
                return Object(self.owner)
            called = self.evaluate(node.func)
            if isinstance(called, Defined):
                if isinstance(called.node, ast.ClassDef):
                    return Object(called)
                return self.vllm.type_of(called.node.returns, called.module)
        return None

    def _attribute(self, node):
        of = self.evaluate(node.value)
        if isinstance(of, Namespace):
            return next((d for d in self.vllm.find(of.module.name, node.attr) if d), None)
        if is_class(of):
            return self.vllm.member(of, node.attr)[1]
        if isinstance(of, Object):
            found = self.vllm.member(of.of, node.attr)[1]
            return self._dotted(NARROWER[node.attr]) if found and node.attr in NARROWER else found
        return None

    def visit_Attribute(self, node):
        of = self.evaluate(node.value)
        if isinstance(of, Namespace):
            found = self.vllm.find(of.module.name, node.attr)
            self.note(f"{of.module.name}.{node.attr}", node, None if found else "is not there")
        cls = of.of if isinstance(of, Object) else of
        own = (getattr(node.value, "id", "") == "self" and node.attr in self.ours
               or ast.unparse(node.value).endswith("kv_cache_spec") and node.attr in SPECS["SizedSpec"])
        if is_class(cls) and not own:
            there, _ = self.vllm.member(cls, node.attr)
            self.note(f"{cls}.{node.attr}", node, None if there else "is not there")
        self.generic_visit(node)

    def visit_Call(self, node):
        self._call(node)
        self.generic_visit(node)

    def _call(self, node):
        name = getattr(node.func, "id", "")
        if name in ("getattr", "setattr"):
            of, words = self.evaluate(node.args[0]), self.evaluate(node.args[1])
            for word in words.all if isinstance(of, Object) and isinstance(words, Words) else ():
                there, _ = self.vllm.member(of.of, word)
                self.note(f"{of.of}.{word}", node, None if there else "is not there")
            return
        starred = any(isinstance(a, ast.Starred) for a in node.args) or any(
            k.arg is None for k in node.keywords)
        keywords = [k.arg for k in node.keywords if k.arg]
        if name in SPECS:
            theirs = self.vllm.one("vllm.v1.kv_cache_interface.FullAttentionSpec")
            fields = self.vllm.fields(theirs) if theirs else set()
            for keyword in set(keywords) - set(SPECS[name]):
                self.note(f"FullAttentionSpec({keyword}=)", node,
                          None if keyword in fields else "is not there")
            return
        for called in self._called(node.func):
            if isinstance(called.node, ast.ClassDef):
                there, init = self.vllm.member(called, "__init__")
                if isinstance(init, Defined):
                    called, bound = init, True
                else:
                    fields = self.vllm.fields(called)
                    for keyword in keywords if fields else ():
                        self.note(f"{called}({keyword}=)", node,
                                  None if keyword in fields else "is not there")
                    continue
            else:
                bound = called.owner is not None and not name
            given = None if starred else len(node.args)
            why = Signature(called.node, bound).refuses(given, keywords)
            some = ["..."] if starred else ["_"] * len(node.args)
            self.note(f"{called}({', '.join([*some, *keywords])})", node, why)

    def _called(self, function):
        """Every definition that a call may reach: one under an if is as good as its others."""
        if isinstance(function, ast.Name):
            found = self.lookup(function.id)
            found = found if isinstance(found, list) else [found]
        else:
            of = self.evaluate(function.value) if isinstance(function, ast.Attribute) else None
            found = (self.vllm.find(of.module.name, function.attr) if isinstance(of, Namespace)
                     else [self.evaluate(function)])
        return [d for d in found if isinstance(d, Defined)]


def own_names(node):
    """Names that a class of ours defines, in its body or by self.NAME = ..."""
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    for part in node.body:
        for target in getattr(part, "targets", [getattr(part, "target", None)]):
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store) and getattr(part.value, "id", "") == "self"}


def shape_names(adapter):
    """Names of the methods of an adapter's CacheShape."""
    tree = ast.parse(adapter.read_text())
    return {part.name for node in tree.body if isinstance(node, ast.ClassDef)
            and node.name == "CacheShape" for part in node.body if isinstance(part, ast.FunctionDef)}


def adapters():
    """{release: adapter}, as the plugin has it."""
    for node in ast.parse((PLUGIN / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ADAPTERS":
            return ast.literal_eval(node.value)
    raise LookupError(f"{PLUGIN}/__init__.py has no ADAPTERS")


def check(sources, adapter):
    """(what the plugin uses of a vLLM through an adapter, what of it is missing: one line each)"""
    chosen, checked, problems = PLUGIN / f"{adapter}.py", set(), []
    for path in sorted(PLUGIN.glob("*.py")):
        if path == chosen or not path.name.startswith("adapter_"):
            found = Uses(Vllm(sources), path, chosen)
            checked |= found.checked
            problems += found.problems
    return sorted(checked), problems


def adapter_of(sources):
    """The adapter of a vLLM by its version. Raises LookupError if there is none."""
    version, known = sources.version(), adapters()
    if version is None:
        raise LookupError(f"{sources.path} does not say its version: name one of --adapter "
                          f"{', '.join(dict.fromkeys(known.values()))}")
    release = ".".join(version.split(".")[:2])
    if release not in known:
        raise LookupError(f"{sources.path} is vLLM {version}; there are adapters for "
                          f"{', '.join(known)}")
    return known[release]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", metavar="TREE_OR_WHEEL")
    parser.add_argument("--adapter", help="in place of that of the version found there")
    parser.add_argument("--list", action="store_true", help="print what was checked")
    arguments = parser.parse_args()
    failed = False
    for path in arguments.sources:
        try:
            sources = Sources(path)
            adapter = arguments.adapter or adapter_of(sources)
        except (LookupError, OSError) as error:
            sys.exit(f"check_vllm_api: {error}")
        checked, problems = check(sources, adapter)
        failed |= bool(problems)
        if arguments.list:
            print("\n".join(checked))
        for problem in problems:
            print(problem)
        print(f"{path}: vLLM {sources.version()}, {adapter}: {len(checked)} uses, "
              f"{len(problems)} of them not as they are there")
    sys.exit(failed)


if __name__ == "__main__":
    main()
