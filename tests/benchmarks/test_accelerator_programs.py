"""Kernels and bytes of programs, counted by hand."""

import accelerator_programs

# An entry with a kernel, a loop of three turns with one each, and a conditional.
PROGRAM = """HloModule step

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %double = f32[8]{0} add(%p, %p)
}

%rare (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %copy = f32[8]{0} copy(%q)
}

%body (r: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = (s32[], f32[8]{0}) parameter(0)
  %count = s32[] get-tuple-element(%r), index=0
  %x = f32[8]{0} get-tuple-element(%r), index=1
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[8]{0}) tuple(%count, %y)
}

ENTRY %main (a: f32[8], b: bf16[4], flag: pred[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = bf16[4]{0} parameter(1)
  %flag = pred[] parameter(2)
  %zero = s32[] constant(0)
  %both = f32[8]{0} fusion(%a, %b), kind=kLoop, calls=%fused
  %carry = (s32[], f32[8]{0}) tuple(%zero, %both)
  %loop = (s32[], f32[8]{0}) while(%carry), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %z = f32[8]{0} get-tuple-element(%loop), index=1
  ROOT %chosen = f32[8]{0} conditional(%flag, %z, %z), true_computation=%rare, false_computation=%rare
}
"""


def test_work_counts_loops_by_their_turns_and_no_branches():
    # 32 bytes of a result, 32 and 8 of operands; three times 32 and 32
    assert accelerator_programs.find_work(PROGRAM) == (4, 72 + 3 * 64)


def test_a_loop_without_a_known_number_of_turns_counts_as_a_conditional():
    text = PROGRAM.replace('"known_trip_count":{"n":"3"}', "")
    assert accelerator_programs.find_work(text) == (1, 72)
