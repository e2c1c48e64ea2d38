"""PTX to C: one function per kernel that runs a thread to its next barrier or collective.

Registers are C locals; those alive across a barrier are kept in the thread's struct. What is not
known here is an error that names the instruction. The C that all kernels share is in runtime.c.
"""

# ruff: noqa: E501 - the C that is made is easier to follow on one line
from __future__ import annotations

import re
from pathlib import Path

from cuengine.device.emulated.ptx import Instruction, Kernel, PtxError, PtxModule, type_size

_REGISTER = re.compile(r"\br_\w+")
_UNSIGNED = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<",
            "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip
_ROUNDING = {"rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
_APPROXIMATE = {"ex2": "exp2f({})", "lg2": "log2f({})", "sin": "sinf({})", "cos": "cosf({})",
                "tanh": "tanhf({})", "rsqrt": "(1 / sqrtf({}))", "rcp": "(1 / {})",
                "sqrt": "sqrtf({})"}  # fmt: skip
_REFUSED = {"cc", "relu", "xorsign", "satfinite"}
"""Modifiers that would change a result and are not translated."""
_COLLECTIVES = ("shfl", "vote", "match", "redux", "ldmatrix", "stmatrix", "mma", "bar", "barrier")


def _ctype(kind: str) -> str:
    if kind == "pred":
        return "uint8_t"
    bits = 8 * type_size(kind)
    if kind[0] == "s":
        return f"int{bits}_t"
    return {"f32": "float", "f64": "double"}.get(kind, f"uint{bits}_t")


class Translation:
    """One kernel's C in `code`; `static_bytes` of shared memory before the launch's own."""

    def __init__(self, module: PtxModule, kernel: Kernel) -> None:
        self.kernel = kernel
        self.params = {name: offset for name, offset, _ in kernel.params}
        self.symbols: dict[str, str] = {}
        self.globals = [v for v in module.variables if v.space in ("global", "const")]
        text = " ".join(o for i in kernel.instructions for o in i.operands)
        offset = local = 0
        dynamic = []
        for v in [*module.variables, *kernel.variables]:
            if v.space == "shared" and re.search(rf"(?<![\w$]){re.escape(v.name)}(?![\w$])", text):
                if not v.size:
                    dynamic.append(v)
                    continue
                offset = -(-offset // v.align) * v.align
                self.symbols[v.name] = f"{offset}u"
                offset += v.size
            elif v.space == "local":
                local = -(-local // v.align) * v.align
                self.symbols[v.name] = f"{local}ull"
                local += v.size
            elif v.space in ("global", "const"):
                self.symbols[v.name] = f"((uint64_t)v_{v.name.replace('$', '_')})"
        self.static_bytes = -(-offset // 16) * 16
        for v in dynamic:
            self.symbols[v.name] = f"{self.static_bytes}u"
        self.local_bytes = -(-local // 16) * 16
        self.saved_words = 1
        self.code = self._function()

    def _function(self) -> str:
        instructions = self.kernel.instructions
        alive = self._alive()
        body, resumes = [], []
        for pc, i in enumerate(instructions):
            if i.label:
                body.append(f"{self._label(i.label)}:;")
                continue
            try:
                lines, written = self._one(i, pc)
            except (KeyError, IndexError, ValueError):
                text = f"{i.opcode} {', '.join(i.operands)}"
                raise PtxError(f"PTX line {i.line}: not translated: {text}") from None
            if written is None:
                text = " ".join(lines)
            else:
                kept = sorted(alive[pc] - (set() if i.guard else written))
                self.saved_words = max(self.saved_words, len(kept))
                save = " ".join(f"t->saved[{n}] = {r};" for n, r in enumerate(kept))
                load = " ".join(
                    f"{r} = ({self._register_type(r)})t->saved[{n}];" for n, r in enumerate(kept)
                )
                before, after = lines
                state = "AT_BARRIER" if i.opcode.split(".")[0] in ("bar", "barrier") and (
                    ".warp" not in i.opcode
                ) else "AT_COLLECTIVE"  # fmt: skip
                resumes.append(f"case {pc + 1}: goto R{pc};")
                text = (
                    f"{before} t->pc = {pc}; t->state = {state}; t->resume = {pc + 1}; {save} "
                    f"return; R{pc}: {load} {after}"
                )
            if i.guard:
                test = i.guard.replace("!", "")
                text = f"if ({'' if '!' in i.guard else '!'}{test}) goto S{pc}; {text} S{pc}:;"
            body.append(text)
        registers = "\n".join(
            f"    {self._register_type(r)} {r} = 0;" for r in self.kernel.registers
        )
        globals_ = "\n".join(
            f"uint8_t v_{v.name.replace('$', '_')}[{max(v.size, 1)}] __attribute__((aligned(16)))"
            f" = {{{', '.join(map(str, v.data)) or '0'}}};"
            for v in self.globals
        )
        runtime = Path(__file__).with_name("runtime.c").read_text()
        return (
            f"#define SAVED_WORDS {self.saved_words}\n"
            f"#define LOCAL_BYTES {self.local_bytes}ull\n{runtime}\n{globals_}\n"
            f"static void run_thread(Thread *t) {{\n{registers}\n"
            f"    switch (t->resume) {{ {' '.join(resumes)} default: break; }}\n"
            + "\n".join(f"    {line}" for line in body)
            + "\n    t->state = EXITED;\n}\n"
        )

    def _label(self, name: str) -> str:
        return "L" + name.replace("$", "_")

    def _register_type(self, name: str) -> str:
        return _UNSIGNED[type_size(self.kernel.registers[name])]

    def _alive(self) -> list[set[str]]:
        """Registers alive after each instruction."""
        code = self.kernel.instructions
        places = {i.label: n for n, i in enumerate(code) if i.label}
        uses, kills = [], []
        for i in code:
            no_result = i.opcode.split(".")[0] in ("st", "red", "bra", "cp", "stmatrix", "bar")
            found = set(_REGISTER.findall(" ".join([*i.operands, i.guard])))
            made: set[str] = set()
            if i.operands and (not no_result or ".red" in i.opcode):
                made = set(_REGISTER.findall(i.operands[0]))
                found = set(_REGISTER.findall(" ".join([*i.operands[1:], i.guard])))
            uses.append(found)
            kills.append(set() if i.guard else made)
        after: list[set[str]] = [set() for _ in code]
        before: list[set[str]] = [set() for _ in code]
        changed = True
        while changed:
            changed = False
            for n in range(len(code) - 1, -1, -1):
                name = code[n].opcode.split(".")[0]
                following = [] if name in ("ret", "exit", "bra") and not code[n].guard else [n + 1]
                if name == "bra":
                    following.append(places[code[n].operands[0]])
                after[n] = set().union(*(before[f] for f in following if f < len(code)))
                now = uses[n] | (after[n] - kills[n])
                if now != before[n]:
                    before[n], changed = now, True
        return after

    def _get(self, operand: str, kind: str) -> str:
        """The operand as a C expression of a PTX type."""
        if operand.startswith("r_"):
            match kind:
                case "f32" | "f64" | "f16" | "bf16":
                    return f"{kind}_of({operand})"
            return f"({_ctype(kind)}){operand}"
        if operand[:2].lower() in ("0f", "0d") and kind[0] in "fb":
            if kind in ("f32", "f64"):
                return f"{kind}_of(0x{operand[2:]}ull)"
            return f"0x{operand[2:]}ull"
        if operand.startswith("%"):
            return self._special(operand)
        if operand in self.symbols:
            return self.symbols[operand]
        value = int(operand.rstrip("U"), 0)
        return f"({_ctype(kind)}){value % (1 << 64)}ull"

    def _special(self, name: str) -> str:
        axis = {"x": 0, "y": 1, "z": 2}.get(name[-1], 0)
        base = name.split(".", maxsplit=1)[0]
        return {"%tid": f"t->tid[{axis}]", "%ntid": f"L->block[{axis}]",
                "%ctaid": f"ctaid[{axis}]", "%nctaid": f"L->grid[{axis}]",
                "%laneid": "(t->index % 32)", "%warpid": "(t->index / 32)"}[base]  # fmt: skip

    def _put(self, register: str, kind: str, value: str) -> str:
        if register == "_":
            return ""
        if kind in ("f32", "f64", "f16", "bf16"):
            value = f"bits_{kind}({value})"
        return f"{register} = ({self._register_type(register)})({value});"

    def _address(self, operand: str) -> str:
        base, _, plus = operand.strip("[] ").partition("+")
        base = base.strip()
        value = base if base.startswith("r_") else self.symbols.get(base) or f"{int(base, 0)}"
        return f"((uint64_t){value} + {int(plus or 0)})" if int(plus or 0) >= 0 else (
            f"((uint64_t){value} - {-int(plus)})")  # fmt: skip

    def _memory(self, i: Instruction, pc: int) -> list[str]:
        parts = i.opcode.split(".")
        kind, size = parts[-1], type_size(parts[-1])
        count = next((int(p[1]) for p in parts if p in ("v2", "v4")), 1)
        store = parts[0] == "st"
        values = i.operands[1 if store else 0].strip("{}").split(",")
        values = [v.strip() for v in values]
        place = i.operands[0 if store else 1]
        if "param" in parts:
            name, _, plus = place.strip("[]").partition("+")
            start = f"L->params + {self.params[name] + int(plus or 0)}"
            check = f"const uint8_t *p = {start};"
        else:
            space = next((p for p in parts if p in ("global", "shared", "local")), "generic")
            space = "global" if "const" in parts else space
            check = (
                f"uint64_t a = {self._address(place)}; aligned(t, a, {size * count}, {pc}); "
                f"uint8_t *p = {space}_at(t, a, {size * count}, {int(store)}, {pc});"
            )
        plain = kind if kind[0] in "su" else f"b{8 * size}"
        moves = []
        for n, value in enumerate(values):
            ctype = _ctype(plain)
            if store:
                source = (
                    self._get(value, kind if kind in ("f32", "f64") else plain)
                    if not value.startswith("r_")
                    else value
                )
                bits = f"bits_{kind}({source})" if source.startswith(f"{kind}_of") else source
                moves.append(
                    f"{{ {ctype} x = ({ctype}){bits}; memcpy(p + {n * size}, &x, {size}); }}"
                )
            else:
                moves.append(
                    f"{{ {ctype} x; memcpy(&x, p + {n * size}, {size}); {self._put(value, plain, 'x')} }}"
                )
        return [f"{{ {check} {' '.join(moves)} }}"]

    def _collective(self, i: Instruction) -> tuple[list[str], set[str]]:
        parts, ops = i.opcode.split("."), i.operands
        name = parts[0]
        if name in ("bar", "barrier"):
            if "warp" in parts:
                return [f"t->kind = SYNC_WARP; t->mask = {self._get(ops[0], 'u32')};", ""], set()
            if "red" in parts or "arrive" in parts:
                raise ValueError
            count = self._get(ops[1], "u32") if len(ops) > 1 else "0"
            return [f"t->kind = BAR_SYNC; t->in[0] = {self._get(ops[0], 'u32')}; "
                    f"t->in[1] = {count}; t->in[2] = 0;", ""], set()  # fmt: skip
        targets = [r.strip() for r in re.split(r"[|,]", ops[0].strip("{}"))]
        written = set(_REGISTER.findall(ops[0]))
        after = " ".join(
            self._put(r, "pred" if self.kernel.registers[r] == "pred" else "u32", f"t->out[{n}]")
            for n, r in enumerate(targets)
            if r != "_"
        )
        if name == "shfl":
            inputs = " ".join(
                f"t->in[{n}] = {self._get(o, 'u32')};" for n, o in enumerate(ops[1:4])
            )
            mask = self._get(ops[4], "u32")
            return [
                f"t->kind = SHFL_{parts[2].upper()}; {inputs} t->mask = {mask};",
                after,
            ], written
        if name == "vote":
            value = ops[1].replace("!", "")
            test = f"{'!' if '!' in ops[1] else ''}{self._get(value, 'pred')}"
            return [f"t->kind = VOTE_{parts[2].upper()}; t->in[0] = {test}; "
                    f"t->mask = {self._get(ops[2], 'u32')};", after], written  # fmt: skip
        if name == "match":
            return [f"t->kind = MATCH_{parts[1].upper()}; t->in[0] = 0; "
                    f"t->in64 = {self._get(ops[1], parts[-1])}; "
                    f"t->mask = {self._get(ops[2], 'u32')};", after], written  # fmt: skip
        if name == "redux":
            sign = f"_{parts[-1][0].upper()}" if parts[2] in ("min", "max") else ""
            return [f"t->kind = REDUX_{parts[2].upper()}{sign}; t->in[0] = {self._get(ops[1], 'u32')}; "
                    f"t->mask = {self._get(ops[2], 'u32')};", after], written  # fmt: skip
        if name == "ldmatrix":
            kind = "LDMATRIX_TRANS" if "trans" in parts else "LDMATRIX"
            return [f"t->kind = {kind}; t->in64 = {self._address(ops[1])}; t->in[8] = "
                    f"{len(targets)}; t->mask = ~0u;", after], written  # fmt: skip
        if name == "mma":
            depth = {"m16n8k16": "K16", "m16n8k8": "K8"}[parts[3]]
            kind = f"MMA_{parts[7].upper()}_{depth}"
            words = [w.strip() for o in ops[1:4] for w in o.strip("{}").split(",")]
            if parts[6] != "f32" or parts[9] != "f32":
                raise ValueError
            inputs = " ".join(
                f"t->in[{n}] = {w if w.startswith('r_') else f'0x{w[2:]}u'};"
                for n, w in enumerate(words)
            )
            return [f"t->kind = {kind}; {inputs} t->mask = ~0u;", after], written
        raise ValueError

    def _one(self, i: Instruction, pc: int) -> tuple[list[str], set[str] | None]:
        parts, ops = i.opcode.split("."), i.operands
        name, kind = parts[0], parts[-1]
        saturates = "sat" in parts and name != "cvt" and kind != "f32"
        if saturates or _REFUSED & set(parts) or (name == "mad" and "hi" in parts):
            raise ValueError
        if name in _COLLECTIVES:
            return self._collective(i)
        if name in ("ld", "ldu", "st"):
            return self._memory(i, pc), None
        if name == "bra":
            return [f"goto {self._label(ops[0])};"], None
        if name in ("ret", "exit"):
            return ["{ t->state = EXITED; return; }"], None
        if name == "trap":
            return [f"fail(TRAPPED, t, {pc}, 0, 0, 0);"], None
        if name in ("membar", "fence", "griddepcontrol", "prefetch"):
            return [";"], None
        if name == "cp":
            if "commit_group" in parts:
                return ["t->group++;"], None
            if "wait_group" in parts:
                return [f"copy_wait(t, {int(ops[0])});"], None
            if "wait_all" in parts:
                return ["t->group++; copy_wait(t, 0);"], None
            if parts[:2] != ["cp", "async"] or "bulk" in parts:
                raise ValueError
            source = self._get(ops[3], "u32") if len(ops) > 3 else ops[2]
            return [f"copy_async(t, {self._address(ops[0])}, {self._address(ops[1])}, "
                    f"{ops[2]}, {source}, {pc});"], None  # fmt: skip
        if name in ("atom", "red"):
            return self._atomic(i, pc), None
        if name == "mov" and any(o.startswith("{") for o in ops):
            return self._pack(i), None
        if name == "cvta":
            space = next((p for p in parts if p in ("shared", "local")), "")
            if space:
                origin = "shared_memory" if space == "shared" else "t->local"
                sign = "-" if "to" in parts else "+"
                value = f"{self._get(ops[1], 'u64')} {sign} (uint64_t){origin}"
                return [self._put(ops[0], "u64", value)], None
            return [self._put(ops[0], "u64", self._get(ops[1], "u64"))], None
        if name == "cvt":
            return [self._convert(parts, ops)], None
        if name in ("setp", "set"):
            return [self._compare(parts, ops)], None
        value = self._arithmetic(
            parts, [self._operand(o, kind, n, name) for n, o in enumerate(ops[1:])], pc
        )
        out = kind
        if parts[1:2] == ["wide"]:
            out = kind[0] + str(16 * type_size(kind))
        elif name in ("popc", "clz", "bfind"):
            out = "u32"
        return [self._put(ops[0], out, value)], None

    def _operand(self, operand: str, kind: str, n: int, name: str) -> str:
        if name == "selp" and n == 2:
            return self._get(operand, "pred")
        if (name in ("shl", "shr") and n == 1) or (
            name in ("bfi", "bfe") and n >= (2 if name == "bfi" else 1)
        ):
            return self._get(operand, "u32")
        return self._get(operand, kind)

    def _arithmetic(self, parts: list[str], x: list[str], pc: int) -> str:
        name, kind = parts[0], parts[-1]
        floating = kind in ("f32", "f64", "f16", "bf16")
        if "x2" in kind or kind in ("f16x2", "bf16x2"):
            raise ValueError
        directed = next((_ROUNDING[p] for p in parts if p in _ROUNDING), None)
        f = "f" if kind == "f32" else ""
        size = 8 * (1 if kind == "pred" else type_size(kind))
        wrap = f"({_ctype(kind)})" if not floating else ""
        if floating and directed:
            op = {"add": 0, "sub": 0, "mul": 1, "fma": 2, "div": 3, "sqrt": 4}[name]
            y = [*x, "0", "0"]
            second = f"-{y[1]}" if name == "sub" else y[1]
            return f"directed_{kind}({directed}, {op}, {y[0]}, {second}, {y[2]})"
        if floating and "approx" in parts and name in _APPROXIMATE:
            if kind == "f64":
                return f"f64_of(bits_f64({_APPROXIMATE[name].replace('f(', '(').format(x[0])}) & ~0xffffffffull)"
            inner = f"flush({x[0]})" if "ftz" in parts else x[0]
            value = _APPROXIMATE[name].format(inner)
            return f"flush({value})" if "ftz" in parts else value
        if floating and name in ("add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt"):
            value = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
                     "fma": f"fma{f}({{0}}, {{1}}, {{2}})", "mad": f"fma{f}({{0}}, {{1}}, {{2}})",
                     "div": "{0} / {1}", "rcp": "1 / {0}", "sqrt": f"sqrt{f}({{0}})"}[name]  # fmt: skip
            value = value.format(*x)
            value = f"saturate_f32({value})" if "sat" in parts else value
            return f"flush({value})" if "ftz" in parts and kind == "f32" else value
        if floating and name in ("min", "max"):
            value = f"f{name}{f}({x[0]}, {x[1]})"
            return (
                f"({x[0]} != {x[0]} || {x[1]} != {x[1]} ? NAN : {value})"
                if "NaN" in parts
                else value
            )
        if name == "mul" and "wide" in parts:
            wide = _ctype(kind[0] + str(2 * size))
            return f"({wide}){x[0]} * ({wide}){x[1]}"
        if name == "mad" and "wide" in parts:
            raise ValueError
        if name == "mul" and "hi" in parts:
            wide = "__int128" if kind == "s64" else "unsigned __int128" if size == 64 else (
                _ctype(kind[0] + str(2 * size)))  # fmt: skip
            return f"{wrap}((({wide}){x[0]} * ({wide}){x[1]}) >> {size})"
        unsigned = f"(uint{size}_t)" if kind != "pred" else ""
        simple = {
            "mov": "{0}", "add": "{u}{0} + {u}{1}", "sub": "{u}{0} - {u}{1}", "mul": "{u}{0} * {u}{1}",
            "mad": "{u}{0} * {u}{1} + {u}{2}", "div": "({1} ? {0} / {1} : -1)",
            "rem": "({1} ? {0} % {1} : {0})", "min": "({0} < {1} ? {0} : {1})",
            "max": "({0} > {1} ? {0} : {1})", "and": "{0} & {1}", "or": "{0} | {1}",
            "xor": "{0} ^ {1}", "not": "!{0}" if kind == "pred" else "~{0}",
            "selp": "({2} ? {0} : {1})", "popc": "__builtin_popcountll({u}{0})",
            "clz": "({u}{0} ? __builtin_clzll({u}{0}) - (64 - {s}) : {s})",
            "brev": "reverse_bits({u}{0}, {s})", "abs": f"fabs{f}({{0}})" if floating else "({0} < 0 ? -{0} : {0})",
            "neg": "-{0}" if floating else "-{u}{0}", "lop3": "logic3({0}, {1}, {2}, {3})",
            "prmt": "permute({0}, {1}, {2})",
            "shl": "shl_64({u}{0}, {1})" if size == 64 else "shl_32({u}{0}, {1})",
            "shr": f"shr_{'s' if kind[0] == 's' else 'u'}{64 if size == 64 else 32}({{0}}, {{1}})",
            "bfi": "bit_insert({0}, {1}, {2}, {3}, {s})",
            "bfe": f"bit_extract({{u}}{{0}}, {{1}}, {{2}}, {{s}}, {int(kind[0] == 's')})",
            "bfind": f"find_top({{u}}{{0}}, {{s}}, {int('shiftamt' in parts)})",
        }  # fmt: skip
        if name == "bfind" and kind[0] == "s":
            raise ValueError
        return simple[name].format(*x, u=unsigned, s=size)

    def _compare(self, parts: list[str], ops: tuple[str, ...]) -> str:
        kind, how = parts[-1], parts[1]
        if parts[0] == "set" or (len(parts) > 3 and parts[2] not in ("ftz",)) or "|" in ops[0]:
            raise ValueError
        a, b = self._get(ops[1], kind), self._get(ops[2], kind)
        if how in ("num", "nan"):
            test = f"{a} == {a} && {b} == {b}"
            return self._put(ops[0], "pred", test if how == "num" else f"!({test})")
        if kind[0] in "f" or kind == "bf16":
            if how[-1] == "u" and how[:-1] in _COMPARE:
                inverse = {"eq": "!=", "ne": "==", "lt": ">=", "le": ">", "gt": "<=", "ge": "<"}
                test = f"!({a} {inverse[how[:-1]]} {b})"
                if how in ("equ", "neu"):
                    test = f"({a} != {a} || {b} != {b} || {a} {_COMPARE[how[:-1]]} {b})"
                return self._put(ops[0], "pred", test)
            if how == "ne":
                return self._put(ops[0], "pred", f"({a} < {b} || {a} > {b})")
        return self._put(ops[0], "pred", f"{a} {_COMPARE[how]} {b}")

    def _convert(self, parts: list[str], ops: tuple[str, ...]) -> str:
        to, of = parts[-2], parts[-1]
        floats = ("f16", "bf16", "f32", "f64")
        mode = next((p for p in parts if p in _ROUNDING), None)
        if to in ("bf16x2", "f16x2"):
            if mode or of != "f32" or "relu" in parts or "satfinite" in parts:
                raise ValueError
            bits, high, low = f"bits_{to[:-2]}", self._get(ops[1], of), self._get(ops[2], of)
            return f"{ops[0]} = (uint32_t){bits}({high}) << 16 | {bits}({low});"
        value = self._get(ops[1], of)
        whole = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        rounding = next((whole[p] for p in parts if p in whole), None)
        if of in floats:
            value = f"{rounding}({value})" if rounding else value
            if to in floats:
                if mode and (of, to) == ("f64", "f32"):
                    value = f"narrow({_ROUNDING[mode]}, {value})"
                elif mode:
                    raise ValueError
                value = f"saturate_f64({value})" if "sat" in parts else value
                value = f"(float)({value})" if to == "f32" else value
                return self._put(
                    ops[0], to, f"flush({value})" if "ftz" in parts and to == "f32" else value
                )
            return self._put(ops[0], to, f"to_{to}({value})")
        if to in floats:
            if mode:
                raise ValueError
            return self._put(ops[0], to, f"({'float' if to == 'f32' else 'double'}){value}")
        if "sat" in parts:
            raise ValueError
        return self._put(ops[0], to, f"({_ctype(to)}){value}")

    def _pack(self, i: Instruction) -> list[str]:
        whole = type_size(i.opcode.split(".")[-1])
        spread = i.operands[0].startswith("{")
        names = [n.strip() for n in i.operands[0 if spread else 1].strip("{}").split(",")]
        bits = 8 * whole // len(names)
        ctype = f"uint{8 * whole}_t"
        if spread:
            moves = " ".join(
                self._put(n, f"u{bits}", f"(uint{bits}_t)(x >> {k * bits})")
                for k, n in enumerate(names)
            )
            return [f"{{ {ctype} x = {self._get(i.operands[1], f'u{8 * whole}')}; {moves} }}"]
        value = " | ".join(
            f"({ctype}){self._get(n, f'u{bits}')} << {k * bits}" for k, n in enumerate(names)
        )
        return [self._put(i.operands[0], f"u{8 * whole}", value)]

    def _atomic(self, i: Instruction, pc: int) -> list[str]:
        parts = i.opcode.split(".")
        kind, size = parts[-1], type_size(parts[-1])
        result = i.operands[0] if parts[0] == "atom" else ""
        place, *values = i.operands[1:] if result else i.operands
        how = next(
            p for p in parts[1:] if p in ("add", "min", "max", "and", "or", "xor", "exch", "cas")
        )
        space = next((p for p in parts if p in ("global", "shared")), "generic")
        x = [self._get(v, kind) for v in values]
        old = (
            "f32_of(o)" if kind == "f32" else "f64_of(o)" if kind == "f64" else f"({_ctype(kind)})o"
        )
        new = {"add": f"{old} + {x[0]}", "min": f"({old} < {x[0]} ? {old} : {x[0]})",
               "max": f"({old} > {x[0]} ? {old} : {x[0]})", "and": f"{old} & {x[0]}",
               "or": f"{old} | {x[0]}", "xor": f"{old} ^ {x[0]}", "exch": x[0],
               "cas": f"({old} == {x[0]} ? {x[-1]} : {old})"}[how]  # fmt: skip
        if kind in ("f32", "f64"):
            new = f"bits_{kind}({new})"
        read = "" if space == "shared" else f"{space}_at(t, a, {size}, 0, {pc}); "
        ctype = _UNSIGNED[size]
        put = f"{result} = o;" if result and result != "_" else ""
        return [f"{{ uint64_t a = {self._address(place)}; aligned(t, a, {size}, {pc}); {read}"
                f"uint8_t *p = {space}_at(t, a, {size}, 2, {pc}); {ctype} o, n; memcpy(&o, p, {size}); "
                f"n = ({ctype})({new}); memcpy(p, &n, {size}); {put} }}"]  # fmt: skip
