"""What the Python sources of a vLLM define, for check_vllm_api.py: read, never imported."""
import ast
import pathlib
import re
import zipfile
from dataclasses import dataclass


class Sources:
    """The Python files of a vLLM, in a folder or a wheel."""

    def __init__(self, path):
        self.path, self.modules = pathlib.Path(path), {}
        self.wheel = zipfile.ZipFile(path) if self.path.is_file() else None
        self.names = set(self.wheel.namelist()) if self.wheel else None
        if not self.has("vllm/__init__.py"):
            raise FileNotFoundError(f"{path} holds no vllm/__init__.py")

    def has(self, name):
        return name in self.names if self.wheel else (self.path / name).is_file()

    def read(self, name):
        return self.wheel.read(name).decode() if self.wheel else (self.path / name).read_text()

    def version(self):
        """None: not said."""
        if self.has("vllm/_version.py"):
            text = self.read("vllm/_version.py")
            found = re.search(r"^__version__ = version = ['\"]([\d.]+)", text, re.MULTILINE)
            return found and found[1]
        return None

    def module(self, name):
        """Module, or None."""
        if name not in self.modules:
            path = name.replace(".", "/")
            files = [f for f in (f"{path}/__init__.py", f"{path}.py") if self.has(f)]
            self.modules[name] = Module(name, self.read(files[0]), files[0]) if files else None
        return self.modules[name]


class Module:
    """What a file binds at its top level: {name: [definitions, imports and assignments]}."""

    def __init__(self, name, text, file):
        self.name, self.tree, self.bindings = name, ast.parse(text), {}
        self.package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
        self._bind(self.tree.body)

    def _bind(self, body):
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                self._add(node.name, node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, target in imports(node, self.package):
                    self._add(name, target)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        self._add(target.id, node)
            else:
                for part in ("body", "orelse", "finalbody"):
                    self._bind(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    self._bind(handler.body)

    def _add(self, name, value):
        self.bindings.setdefault(name, []).append(value)


def imports(node, package):
    """(the name that is bound, (module, name in it or None)) of an import statement."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0], (alias.name if alias.asname else
                                                             alias.name.split(".")[0], None)
        return
    base = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    for alias in node.names:
        yield alias.asname or alias.name, (module, alias.name)


@dataclass(frozen=True)
class Defined:
    """A class or function of a vLLM's; `owner`: the class whose method it is."""

    module: Module
    node: ast.AST
    owner: object = None

    def __str__(self):
        return f"{self.owner or self.module.name}.{self.node.name}"


def is_class(found):
    return isinstance(found, Defined) and isinstance(found.node, ast.ClassDef)


@dataclass(frozen=True)
class Object:
    """A value of a type."""

    of: Defined


@dataclass(frozen=True)
class Many:
    """A container of values."""

    of: object


@dataclass(frozen=True)
class Namespace:
    """A module of a vLLM's."""

    module: Module


class Vllm:
    """Looks names up in the sources."""

    def __init__(self, sources):
        self.sources = sources

    def find(self, module, name, seen=()):
        """Definitions of a name in a module: Defined, Namespace, or None for what has no type. Empty:
        there is no such name."""
        source = self.sources.module(module)
        if source is None or (module, name) in seen:
            return []
        if name is None:
            return [Namespace(source)]
        found = []
        for value in source.bindings.get(name, ()):
            if isinstance(value, tuple):
                found += (self.find(*value, (*seen, (module, name))) if value[0].startswith("vllm")
                          else [None])
            elif isinstance(value, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append(Defined(source, value))
            else:
                made = getattr(value, "value", None)
                if isinstance(made, ast.Call) and isinstance(made.func, ast.Name):
                    kinds = self.find(module, made.func.id, (*seen, (module, name)))
                    found += [Object(kind) if is_class(kind) else None for kind in kinds]
                else:
                    found.append(None)
        if not found and self.sources.module(f"{module}.{name}"):
            found = [Namespace(self.sources.module(f"{module}.{name}"))]
        return found

    def one(self, dotted):
        module, _, name = dotted.rpartition(".")
        return next((d for d in self.find(module, name) if d), None)

    def bases(self, cls):
        """The class and those that it inherits from, as far as they are vLLM's; nearest first."""
        found, queue = [], [cls]
        while queue:
            current = queue.pop(0)
            if current in found:
                continue
            found.append(current)
            for base in current.node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                value = self.expression(base, current.module)
                if isinstance(value, Defined):
                    queue.append(value)
        return found

    def expression(self, node, module):
        """What a name or a dotted name of a vLLM's module stands for."""
        if isinstance(node, ast.Name):
            return next((d for d in self.find(module.name, node.id) if d), None)
        if isinstance(node, ast.Attribute):
            base = self.expression(node.value, module)
            if isinstance(base, Namespace):
                return next((d for d in self.find(base.module.name, node.attr) if d), None)
        return None

    def type_of(self, annotation, module):
        """Object or Many of an annotation, or None."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self.type_of(annotation.left, module) or self.type_of(annotation.right, module)
        if isinstance(annotation, ast.Subscript):
            kind = getattr(annotation.value, "id", "")
            item = annotation.slice
            if kind in ("list", "tuple", "set", "Sequence", "Iterable"):
                item = item.elts[0] if isinstance(item, ast.Tuple) else item
                return Many(self.type_of(item, module))
            return None
        found = self.expression(annotation, module)
        return Object(found) if is_class(found) else None

    def member(self, cls, name):
        """(whether objects of a class have it, its type: Object, Many, Defined of a method, None)"""
        there = False
        for base in self.bases(cls):
            for kind, value, annotation in self._members(base, name):
                there = True
                if kind == "method":
                    if any(getattr(d, "id", getattr(d, "attr", "")) in ("property", "cached_property")
                           for d in value.decorator_list):
                        return True, self.type_of(value.returns, base.module)
                    return True, Defined(base.module, value, base)
                found = self.type_of(annotation, base.module) if annotation is not None else None
                if found is None and isinstance(value, ast.Call):
                    made = self.expression(value.func, base.module)
                    found = Object(made) if is_class(made) else None
                if found is not None:
                    return True, found
        return there, None

    def _members(self, cls, name):
        for node in cls.node.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if node.name == name:
                    yield "method", node, None
                arguments = {a.arg: a.annotation for a in node.args.args + node.args.kwonlyargs}
                for part in ast.walk(node):
                    targets = (part.targets if isinstance(part, ast.Assign) else
                               [part.target] if isinstance(part, ast.AnnAssign) else [])
                    for target in (t for many in targets for t in getattr(many, "elts", [many])):
                        if (isinstance(target, ast.Attribute) and target.attr == name
                                and getattr(target.value, "id", "") == "self"):
                            value = part.value
                            known = getattr(part, "annotation", None)
                            if isinstance(value, ast.Name):
                                known = known or arguments.get(value.id)
                            yield "value", value, known
            elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
                yield "value", node.value, node.annotation
            elif isinstance(node, ast.Assign) and name in [getattr(t, "id", "") for t in node.targets]:
                yield "value", node.value, None

    def fields(self, cls):
        """Names that the constructor of a dataclass takes."""
        return {node.target.id for base in self.bases(cls) for node in base.node.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}

    def abstract(self, cls):
        """Names of methods that a subclass has to define."""
        made, open_ = set(), []
        for base in self.bases(cls):
            for node in base.node.body:
                if isinstance(node, ast.FunctionDef) and node.name not in made:
                    made.add(node.name)
                    if any(getattr(d, "id", "") == "abstractmethod" for d in node.decorator_list):
                        open_.append(node.name)
        return open_


class Signature:
    """The parameters of a function, the bound one left out."""

    def __init__(self, function, bound):
        a = function.args
        static = any(getattr(d, "id", "") == "staticmethod" for d in function.decorator_list)
        positional = [p.arg for p in a.posonlyargs + a.args][1 if bound and not static else 0:]
        self.positional, self.keywords = positional, [p.arg for p in a.kwonlyargs]
        self.any_position, self.any_keyword = a.vararg is not None, a.kwarg is not None
        required = positional[:len(positional) - len(a.defaults)] if a.defaults else positional
        self.required = {*required, *(p.arg for p, d in zip(a.kwonlyargs, a.kw_defaults) if d is None)}

    def refuses(self, positions, keywords):
        """Why a call with so many positional arguments and these keywords fails; None: it does not.
        `positions` None: there are others that only a run knows."""
        if positions is not None and positions > len(self.positional) and not self.any_position:
            return f"takes {len(self.positional)} positional arguments, not {positions}"
        for name in keywords:
            if name not in (*self.positional, *self.keywords) and not self.any_keyword:
                return f"has no parameter {name}"
        if positions is None:
            return None
        missing = self.required - set(self.positional[:positions]) - set(keywords)
        return f"wants {', '.join(sorted(missing))}" if missing else None

    def takes_less_than(self, theirs):
        """Why a method with this signature cannot stand in for one with theirs; None: it can."""
        for i, name in enumerate(theirs.positional):
            here = self.positional[i] if i < len(self.positional) else None
            by_name = here is None and (name in self.keywords or self.any_keyword)
            if here != name and not self.any_position and not by_name:
                return f"does not take its parameter {name} there"
        for name in theirs.keywords:
            if name not in (*self.positional, *self.keywords) and not self.any_keyword:
                return f"does not take its parameter {name}"
        missing = self.required - {*theirs.positional, *theirs.keywords}
        if missing and not (theirs.any_position or theirs.any_keyword):
            return f"wants {', '.join(sorted(missing))}, which vLLM does not give"
        return None
