"""The audit's counting, on machine code whose every instruction is known."""

import pytest

from woq_triton.audit import amdgcn, sass, ttgir
from woq_triton.audit.instructions import Instruction, Program
from woq_triton.audit.mainloop import CLASSES, find_main_loop


def assemble(*lines: str) -> str:
    """Instructions and labels in the form in which nvdisasm prints them."""
    text, address = [".text.kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(text)


def only(line: str) -> Instruction:
    (instruction,) = sass.parse(assemble(line)).instructions
    return instruction


def registers(text: str) -> frozenset[str]:
    return frozenset(text.split())


@pytest.mark.parametrize(
    ("line", "defs", "uses", "address"),
    [
        (
            "HMMA.16816.F32 R32, R40, R26, R52",
            "R32 R33 R34 R35",
            "R40 R41 R42 R43 R26 R27 R52 R53 R54 R55",
            "",
        ),
        ("HMMA.16816.F32 R32, R40.reuse, R26, RZ", "R32 R33 R34 R35", "R40 R41 R42 R43 R26 R27", ""),
        ("HMMA.1688.F32 R4, R8, R12, R4", "R4 R5 R6 R7", "R8 R9 R12 R4 R5 R6 R7", ""),
        (
            "HGMMA.64x8x16.F32 R24, R16, gdesc[UR8], R24",
            "R24 R25 R26 R27",
            "R16 R17 R18 R19 R24 R25 R26 R27",
            "UR8 UR9",
        ),
        ("LDG.E.128 R4, desc[UR16][R12.64+0x40]", "R4 R5 R6 R7", "", "UR16 UR17 R12 R13"),
        ("@!P1 STS.64 [R64+UR5+0x7800], R4", "", "P1 R4 R5", "R64 UR5"),
        ("LDGSTS.E.BYPASS.128 [R33+0x800], desc[UR16][R18.64], !P1", "", "P1", "R33 UR16 UR17 R18 R19"),
        ("LDSM.16.M88.4 R24, [R72+0x6000]", "R24 R25 R26 R27", "", "R72"),
        ("IMAD.WIDE R12, R13, 0x2, R76", "R12 R13", "R13 R76 R77", ""),
        ("LEA R26, P0, R27, R0, 0x1", "R26 P0", "R27 R0", ""),
        ("ISETP.NE.AND P1, PT, R4, 0x7, !P2", "P1", "R4 P2", ""),
        ("LOP3.LUT P0, RZ, R0, 0x1, RZ, 0xc0, !PT", "P0", "R0", ""),
        ("CS2R R8, SRZ", "R8 R9", "", ""),
        ("PRMT R62, R7, 0x7610, R62", "R62", "R7", ""),
        ("PRMT R62, R7, 0x5410, R62", "R62", "R7 R62", ""),
        ("FFMA2 R4, R8, R10, R4", "R4 R5", "R8 R9 R10 R11 R4 R5", ""),
    ],
)
def test_sass_operands_span_the_registers_that_the_instruction_touches(line, defs, uses, address):
    instruction = only(line)
    assert instruction.defs == registers(defs)
    assert instruction.uses == registers(uses)
    assert instruction.address == registers(address)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("HFMA2.MMA R5, -RZ, RZ, 0, 0", "move"),
        ("HFMA2.MMA R5, R6, R7, R8", "float"),
        ("HADD2.F32 R71, -RZ, R71.H0_H0", "float"),
        ("IMAD.MOV.U32 R32, RZ, RZ, 0x100010", "move"),
        ("IMAD.U32 R3, R3, 0x10000, RZ", "widen"),
        ("PRMT R9, RZ, 0x5410, R10", "widen"),
        ("PRMT R9, R9, 0x5410, R10", "arrange"),
        ("LOP3.LUT R9, R8, 0xffff0000, RZ, 0xc0, !PT", "widen"),
        ("LOP3.LUT R9, R8, 0xf000f, RZ, 0xc0, !PT", "integer"),
        ("I2FP.F32.U32 R9, R8", "convert"),
        ("F2FP.BF16.F32.PACK_AB R9, R8, R7", "float"),
        ("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0", "matrix"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "control"),
        ("LDGDEPBAR", "memory"),
    ],
)
def test_sass_names_say_what_an_instruction_does(line, kind):
    assert only(line).kind == kind


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("HMMA.16816.F32 R32, R40, R26, R52", "registers"),
        ("HGMMA.64x16x16.F32.BF16 R24, R16, gdesc[UR8], R24, gsb0", "registers"),
        ("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", "shared"),
        ("UTCHMMA tmem[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0", "tensor"),
        ("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0", "shared"),
    ],
)
def test_the_left_operand_of_a_matrix_instruction_is_found(line, left):
    assert only(line).left == left


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("LDG.E.U16 R4, desc[UR16][R12.64]", 2),
        ("LDG.E R4, desc[UR16][R12.64]", 4),
        ("LDG.E.64 R4, desc[UR16][R12.64]", 8),
        ("LDGSTS.E.BYPASS.128 [R33], desc[UR16][R8.64]", 16),
        ("LDS.128 R4, [R5]", 0),
        ("STG.E.128 desc[UR16][R4.64], R16", 0),
    ],
)
def test_only_loads_from_global_memory_count_with_their_width(line, width):
    assert only(line).loads == width


# One iteration of a decode loop in small: what each line is there for stands beside it. The address
# of the load is advanced after its use, so it depends on the iteration before.
LOOP = [
    (".L_x_1:", ""),
    ("DEPBAR.LE SB0, 0x1", "other"),
    ("IMAD R72, R15, 0x200, R66", "address"),
    ("LDSM.16.M88.4 R36, [R72]", "memory"),
    ("LDSM.16.M88.4 R24, [R72+0x6000]", "memory"),
    ("LDG.E R71, desc[UR16][R12.64]", "memory"),
    ("SHF.R.U32.HI R36, RZ, 0x8, R36", "unpack"),
    ("LOP3.LUT R32, R36, 0xf000f, RZ, 0xc0, !PT", "unpack"),
    ("LOP3.LUT R33, R37, 0xf000f, RZ, 0xc0, !PT", "unpack"),
    ("LOP3.LUT R34, R38, 0xf000f, RZ, 0xc0, !PT", "unpack"),
    ("LOP3.LUT R35, R39, 0xf000f, RZ, 0xc0, !PT", "unpack"),
    ("HMMA.16816.F32 R32, R32, R24, RZ", "matrix"),
    ("PRMT R71, R71, 0x7632, R71", "scale"),
    ("IMAD.U32 R71, R71, 0x10000, RZ", "scale"),
    ("FFMA R8, R32, R71, R8", "scale"),
    ("IMAD.WIDE R12, R11, 0x2, R84", "address"),
    ("VIADD R11, R11, 0x20", "address"),
    ("IMAD.MOV.U32 R40, RZ, RZ, R41", "other"),
    ("UIADD3 UR7, UR7, 0x1, URZ", "other"),
    ("ISETP.NE.AND P0, PT, R90, UR7, PT", "other"),
    ("@P0 BRA `(.L_x_1)", "other"),
]


def program(*lines: str) -> Program:
    before = ["S2R R62, SR_TID.X", ".L_x_0:", "SYNCS.PHASECHK P2, [R4]", "@!P2 BRA `(.L_x_0)"]
    after = [".L_x_3:", "LDG.E.128 R4, desc[UR16][R62.64]", "FADD R8, R8, R4", "@P5 BRA `(.L_x_3)", "EXIT"]
    return sass.parse(assemble(*before, *lines, *after))


def test_the_main_loop_is_the_one_with_the_matrix_instructions():
    loop = find_main_loop(program(*(line for line, _ in LOOP)))
    assert [instruction.text for instruction in loop.instructions] == [line for line, _ in LOOP[1:]]


def test_a_small_loop_that_waits_inside_the_main_loop_is_part_of_it():
    lines = [line for line, _ in LOOP]
    waiting = [".L_x_2:", "SYNCS.PHASECHK P3, [R4]", "@!P3 BRA `(.L_x_2)"]
    loop = find_main_loop(program(*lines[:3], *waiting, *lines[3:]))
    assert len(loop.instructions) == len(LOOP) - 1 + 2


def test_a_source_without_a_loop_is_counted_whole():
    whole = program(*(line for line, _ in LOOP))
    assert find_main_loop(whole, looped=False).instructions == whole.instructions


def test_a_loop_that_the_compiler_unrolled_entirely_is_not_mistaken_for_one_that_retries():
    straight = program(*(line for line, _ in LOOP[1:-1]))
    assert find_main_loop(straight).instructions == straight.instructions


def test_each_instruction_is_classed_by_what_it_is_there_for():
    loop = find_main_loop(program(*(line for line, _ in LOOP)))
    expected = [(line, kind) for line, kind in LOOP if kind]
    found = [
        (instruction.text, kind) for instruction, kind in zip(loop.instructions, loop.classes, strict=True)
    ]
    assert found == expected
    assert loop.by_class() == {name: sum(kind == name for _, kind in LOOP) for name in CLASSES}
    assert loop.matrix() == {"HMMA.16816.F32": 1}


def test_without_a_matrix_unit_the_multiply_adds_are_the_products():
    lines = [".L_x_1:", "LDS R4, [R5]", "FFMA R8, R4, R6, R8", "FFMA2 R10, R4, R6, R10", "@P0 BRA `(.L_x_1)"]
    loop = find_main_loop(sass.parse(assemble(*lines)))
    assert loop.products() == 3
    assert loop.by_class()["matrix"] == 2


def test_stores_of_unpacked_weights_are_told_from_other_stores():
    stores = [
        "STS.128 [R90], R32",  # unpacked by the LOP3s of LOOP
        "STS [R90], R71",  # a scale
        "PRMT R95, R93, 0x5410, R94",
        "STS [R90], R95",  # two activations put side by side
        "STS.128 [R90], R36",  # the words of the shift: unpacked, if only by a shift
        "STS [R90], R8",  # a sum of products with weights
    ]
    lines = [line for line, _ in LOOP]
    unpacked = lines.index("HMMA.16816.F32 R32, R32, R24, RZ")
    loop = find_main_loop(program(*lines[:unpacked], *stores, *lines[unpacked:]))
    assert loop.weight_stores() == 2
    assert sum(instruction.stores_shared for instruction in loop.instructions) == 5


AMD = """
kernel:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	.loc	3 122 56                        ; mainloop.py:122:56
	v_add_u32_e32 v20, s46, v16
	s_add_i32 s46, s46, 64
	buffer_load_dwordx4 v[2:5], v20, s[4:7], 0 offen
	s_waitcnt lgkmcnt(0)
	ds_read_b64 v[26:27], v21
	;;#ASMSTART
	v_and_b32 v30, 0x000f000f, v26
	;;#ASMEND
	v_and_b32 v31, 0x000f000f, v27
	v_mfma_f32_16x16x16_f16 v[92:95], v[60:61], v[30:31], 0
	v_lshlrev_b32_e32 v6, 16, v7
	v_and_b32_e32 v7, 0xffff0000, v7
	v_pk_fma_f32 v[70:71], v[92:93], v[6:7], v[70:71] op_sel_hi:[1,0,1]
	v_bfe_u32 v8, v70, 16, 1
	v_add3_u32 v8, v70, v8, s9
	ds_write_b32 v22, v8
	ds_write_b128 v22, v[2:5]
	s_cmp_lg_u32 s46, s8
	s_cbranch_scc1 .LBB0_1
	s_endpgm
    .vgpr_count:     118
    .vgpr_spill_count: 3
"""


def test_amd_vector_instructions_are_counted_and_scalar_ones_kept_apart():
    loop = find_main_loop(amdgcn.parse(AMD))
    assert loop.by_class() == {
        "unpack": 2,
        "scale": 5,
        "matrix": 1,
        "memory": 4,
        "address": 1,
        "other": 0,
    }
    assert sum(instruction.scalar for instruction in loop.instructions) == 4
    assert [instruction.loads for instruction in loop.instructions if instruction.loads] == [16]
    assert loop.weight_stores() == 0  # what is stored are packed words and a rounded number
    assert amdgcn.resources(AMD)["vgprs"] == 118
    assert amdgcn.resources(AMD)["vgpr_spills"] == 3


TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [16, 2], warpsPerCTA = [4, 1]}>
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 8]}>
module {
  tt.func public @kernel(%x: !tt.ptr<f16>) {
    %w0 = ttg.async_copy_global_to_local %p, %b : tensor<128x32x!tt.ptr<i16>, #blocked> -> <128x32xi16>
    %w1 = ttg.async_copy_global_to_local %p, %b : tensor<128x32x!tt.ptr<i16>, #blocked> -> <128x32xi16>
    %r = scf.for %i = %a to %b step %c iter_args(%acc = %z) -> (tensor<128x8xf32, #mma>)  : i32 {
      %s = tt.load %q : tensor<128x!tt.ptr<f16>, #blocked>
      %y = scf.if %t -> (tensor<128xf16>) {
        scf.yield %s : tensor<128xf16>
      } else {
        scf.yield %s : tensor<128xf16>
      }
      %d = tt.dot %w, %v, %z : tensor<128x32xf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>> * \
tensor<32x8xf16, #ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 2}>> -> tensor<128x8xf32, #mma>
      %w2 = ttg.async_copy_global_to_local %p, %b : tensor<128x32x!tt.ptr<i16>, #blocked> -> <128x32xi16>
      scf.yield %d : tensor<128x8xf32, #mma>
    }
    %l = tt.load %p : tensor<128x32x!tt.ptr<i16>, #blocked>
    tt.return
  }
}
"""


def test_the_source_loop_tells_weights_products_and_prefetch():
    loop = ttgir.read(TTGIR)
    assert (loop.packed_words, loop.word_bits) == (128 * 32, 16)
    # 128 rows over 4 warps of 16 rows, 8 columns in one, 32 deep in steps of 16
    assert loop.matrix_instructions == 2 * 1 * 2
    assert loop.prefetched == 2
    assert loop.looped


def test_a_source_without_a_loop_has_all_its_loads_in_one_iteration():
    lines = [line for line in TTGIR.splitlines() if "scf" not in line and line.strip() != "}"]
    loop = ttgir.read("\n".join(lines))
    assert not loop.looped
    assert loop.packed_words == 4 * 128 * 32
