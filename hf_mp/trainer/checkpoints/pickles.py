"""What a pickle would become, told from its opcodes alone: nothing of it is run, and nothing large is made.

A pickle may name one object many times: 28 tuples, each of eight times the one before, take 7 KB and are 8^28 values to
whatever formats, hashes, casts or copies them. And a single call may make memory out of a number (``bytearray(2**36)``)
or out of a tensor that repeats one byte.
"""

from __future__ import annotations

import pickletools
from typing import IO, Any, cast

MAX_PICKLE_BYTES = 64 * 2**20  # names and shapes in a file of torch.save; those of 10,000 parameters take 5 MB
MAX_OBJECTS = 10_000_000  # some 100 bytes each
MAX_DEPTH = 100

# Of what torch's restricted unpickler calls, these take anything that can be iterated over: a literal is as long as it
# is in the file, a tensor that repeats its one byte is not.
_ITERATE = ("builtins set", "collections Counter", "collections OrderedDict", "torch Size")
_CHANGE_THE_FIRST = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_CALLS = ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ")


class PickleProblem(ValueError):
    """Why a pickle is not loaded; without the name of its file."""


class _Node:
    """An object: what it consists of, how many values and characters it is by itself, and how it came to be."""

    __slots__ = ("children", "how", "name", "size")

    def __init__(self, children: list[_Node], size: int = 1, how: str = "", name: str = "") -> None:
        self.children, self.size, self.how, self.name = children, size, how, name


def check_pickle(file: IO[bytes]) -> None:
    """Raise for a pickle that grows in memory when it is loaded, formatted, hashed, cast or copied.

    Raises:
        PickleProblem: for more than 64 Mi values and characters once nothing is shared, for more than 100 levels,
            objects that hold themselves, and calls that make memory out of a number; ValueError, LookupError for no
            pickle.
    """
    content = file.read(MAX_PICKLE_BYTES + 1)
    if len(content) > MAX_PICKLE_BYTES:
        raise PickleProblem(f"has a pickle of more than {MAX_PICKLE_BYTES} bytes, which can fill the memory")
    if _unfolded(_build(content)) > MAX_PICKLE_BYTES:
        raise PickleProblem(
            f"has objects that share their parts and unfold to more than {MAX_PICKLE_BYTES} values, which can fill the "
            "memory"
        )


def _build(content: bytes) -> _Node:
    """The graph of the objects that a pickle makes."""
    mark, plain = _Node([]), _Node([])
    stack: list[_Node] = []
    memo: dict[int, _Node] = {}
    for number, (opcode, operand, _) in enumerate(pickletools.genops(content)):
        name, argument = opcode.name, cast(Any, operand)
        if number > MAX_OBJECTS:
            raise PickleProblem(f"makes more than {MAX_OBJECTS} objects, which can fill the memory")
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif "GET" in name:
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(mark)
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            taken = _take(stack, opcode.stack_before, mark)
            if opcode.stack_after:
                size = 1 + len(argument) if isinstance(argument, (str, bytes)) else 1
                stack.append(_made(name, argument, taken) or (plain if size == 1 else _Node([], size)))
            elif name == "STOP":
                return taken[0]
    raise ValueError("has no end")


def _take(stack: list[_Node], before: list[Any], mark: _Node) -> list[_Node]:
    """Take off the stack what an opcode takes, in the order in which it was put there."""
    above: list[_Node] = []
    if pickletools.markobject in before:
        while (top := stack.pop()) is not mark:
            above.append(top)
        before = before[: before.index(pickletools.markobject)]
    return [*(stack.pop() for _ in before)][::-1] + above[::-1]


def _made(opcode: str, argument: Any, taken: list[_Node]) -> _Node | None:
    """What an opcode leaves on the stack; None for a value without parts."""
    if opcode in _CHANGE_THE_FIRST:
        if not taken[0].how:
            raise PickleProblem("changes a value that cannot be changed")
        taken[0].children += taken[1:]
        return taken[0]
    if opcode in ("GLOBAL", "INST", "STACK_GLOBAL"):
        named = " ".join(node.name for node in taken) if opcode == "STACK_GLOBAL" else argument
        return _Node([], how=opcode, name=named)
    if opcode in _CALLS:
        _check_call(taken)
    if opcode.endswith("UNICODE"):
        return _Node([], 1 + len(argument), name=argument)
    return _Node(taken, how=opcode) if taken or opcode.startswith("EMPTY") else None


def _check_call(taken: list[_Node]) -> None:
    function, arguments = taken[0].name, [child for node in taken[1:] for child in node.children]
    module, _, name = function.rpartition(" ")
    makes = module.partition(".")[0] == "torch" and name.endswith(("Tensor", "Storage"))
    if makes or function in ("builtins bytearray", "__builtin__ bytearray"):
        raise PickleProblem(f"calls {name}, which can fill the memory")
    known = function.replace("__builtin__", "builtins") in _ITERATE
    if known and any(node.how in _CALLS for node in arguments):
        raise PickleProblem(f"calls {name} on what a call returned, which can fill the memory")


def _unfolded(root: _Node) -> int:
    """How many values and characters there are below ``root`` once nothing is shared."""
    total: dict[int, tuple[int, int]] = {}  # by node: values and levels
    entered: set[int] = set()
    left = [root]
    while left:
        node = left[-1]
        if id(node) not in entered:
            entered.add(id(node))
            for child in node.children:
                if id(child) in entered and id(child) not in total:
                    raise PickleProblem("has an object that holds itself")
            left += [child for child in node.children if id(child) not in total]
            continue
        left.pop()
        if id(node) not in total:
            below = [total[id(child)] for child in node.children]
            depth = 1 + max((levels for _, levels in below), default=0)
            if depth > MAX_DEPTH:
                raise PickleProblem(f"is nested more than {MAX_DEPTH} levels deep")
            total[id(node)] = (node.size + sum(values for values, _ in below), depth)
    return total[id(root)][0]
