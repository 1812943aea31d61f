// Rules of vector instructions.
#include "rule.h"

RULE(mask_too_wide)
{
    const auto a = env.Ones();
    Adds(a, a, 1.0f, env.bad ? 65 : 64, 1, {1, 1, 8, 8});
}
RULE(repeat_too_often) { Duplicate(env.Fresh<float>(64), 1.0f, 8, env.bad ? 256 : 255, 1, 0); }
RULE(repeat_too_often_in_sum) { WholeReduceSum(env.Fresh<float>(512), env.Ones(64), 64, env.bad ? 256 : 255, 1, 1, 0); }
RULE(negative_count) { Duplicate(env.Fresh<float>(64), 1.0f, env.bad ? -1 : 1); }
RULE(destination_stride_zero)
{
    const auto a = env.Ones();
    Adds(a, a, 1.0f, 64, 1, {env.bad ? 0 : 1, 1, 8, 8});
}
RULE(operand_address)
{
    const auto a = env.Ones();
    Adds(a, a[env.bad ? 4 : 0], 1.0f, 64);
}
RULE(overlap_in_part)
{
    const auto a = env.Ones();
    Adds(a, a[env.bad ? 8 : 64], 1.0f, 64);
}
RULE(overlap_of_repeats)
{
    const auto a = env.Ones();
    Adds(a[64], a[env.bad ? 0 : 64], 1.0f, 64, 2, {1, 1, 8, 8});
}
// Documented: dst and the second source of Add may stay where they are and accumulate; the first source may not.
RULE(accumulate_first_source)
{
    const auto a = env.Ones();
    if (env.bad) {
        Add(a, a, a[64], 64, 3, {1, 1, 1, 0, 0, 8});
    } else {
        Add(a, a[64], a, 64, 3, {1, 1, 1, 0, 8, 0});
        env.Store(env.y, a, 64);
    }
}
RULE(type_of_add)
{
    const auto a = env.Fresh<float>(64);
    Duplicate(a, 1.0f, 64);
    if (env.bad) {
        const auto b = a.ReinterpretCast<bfloat16_t>();
        Add(b, b, b, 64);
    }
    Add(a, a, a, 64);
}
RULE(type_of_axpy)
{
    const auto a = env.Ones(64);
    if (env.bad) {
        const auto b = a.ReinterpretCast<bfloat16_t>();
        Axpy(b, b, ToBfloat16(1.0f), 64);
    }
    Axpy(a, a, 1.0f, 64);
}
RULE(cast_none_to_bfloat16)
{
    Cast(env.Fresh<bfloat16_t>(64), env.Ones(64), env.bad ? RoundMode::CAST_NONE : RoundMode::CAST_RINT, 64);
}
RULE(cast_unsupported_pair)
{
    const auto a = env.Ones(64).ReinterpretCast<half>();
    if (env.bad) {
        Cast(env.Fresh<bfloat16_t>(64), a, RoundMode::CAST_RINT, 64);
    } else {
        Cast(env.Fresh<float>(64), a, RoundMode::CAST_NONE, 64);
    }
}
RULE(integer_overflow)
{
    const auto a = env.Fresh<int32_t>(64);
    Duplicate(a, INT32_MAX, 64);
    Adds(a, a, env.bad ? 1 : 0, 64);
}
RULE(sum_address) { BlockReduceSum(env.Fresh<float>(64)[env.bad ? 1 : 0], env.Ones(64), 1, 64, 1, 1, 8); }
RULE(sum_in_place)
{
    const auto a = env.Ones(128);
    WholeReduceSum(a[env.bad ? 0 : 64], a, 64, 1, 1, 1, 8);
}
RULE(sum_scratch) { ReduceSum<float>(env.Fresh<float>(8), env.Ones(), env.Fresh<float>(env.bad ? 8 : 16), 64, 16, 8); }
RULE(brcb_in_place)
{
    const auto a = env.Ones(128);
    Brcb(a[env.bad ? 0 : 64], a, 1, {1, 8});
}
RULE(brcb_stride) { Brcb(env.Fresh<float>(64), env.Ones(8), 1, {env.bad ? 0 : 1, 8}); }

// The offsets 0, step, 2 step, ... and the numbers that they point at.
struct Gathered {
    Gathered(Env& env, int32_t step)
        : source(env.Ones(64)), target(env.Fresh<float>(64)), offsets(env.Fresh<uint32_t>(64))
    {
        for (int32_t i = 0; i < 8; ++i) {
            offsets.SetValue(i, i * step);
        }
    }

    LocalTensor<float> source, target;
    LocalTensor<uint32_t> offsets;
};

RULE(gather_offset)
{
    Gathered g(env, env.bad ? 6 : 8);
    Gather(g.target, g.source, g.offsets, 0, 8);
}
RULE(gather_base)
{
    Gathered g(env, 4);
    Gather(g.target, g.source, g.offsets, env.bad ? 2 : 4, 8);
}
RULE(gather_beyond)
{
    Gathered g(env, env.bad ? 40 : 36);
    Gather(g.target, g.source, g.offsets, 0, 8);
}
RULE(gather_unwritten)
{
    Gathered g(env, 4);
    Duplicate(g.target, 1.0f, env.bad ? 7 : 8);
    Gather(env.Fresh<float>(8), g.target, g.offsets, 0, 8);
}
RULE(gather_offsets_unwritten)
{
    Gathered g(env, 4);
    Gather(g.target, g.source, g.offsets, 0, env.bad ? 9 : 8);
}
RULE(gather_from_a_short_source)
{
    const auto offsets = env.Fresh<uint32_t>(128);
    Duplicate(offsets, uint32_t{0}, 128);
    Gather(env.Fresh<float>(128), env.Ones(env.bad ? 64 : 72), offsets, 0, 128);
}
RULE(gather_in_place)
{
    Gathered g(env, 4);
    Gather(g.source[env.bad ? 0 : 8], g.source, g.offsets, 0, 8);
}
RULE(gather_onto_offsets)
{
    Gathered g(env, 4);
    Gather(env.bad ? g.offsets.ReinterpretCast<float>() : g.target, g.source, g.offsets, 0, 8);
}
RULE(gather_address)
{
    Gathered g(env, 4);
    Gather(g.target[env.bad ? 4 : 8], g.source, g.offsets, 0, 8);
}
RULE(type_of_gather)
{
    Gathered g(env, 4);
    if (env.bad) {
        Gather(g.target.ReinterpretCast<uint8_t>(), g.source.ReinterpretCast<uint8_t>(), g.offsets, 0, 8);
    }
}
RULE(cast_byte_to_float)
{
    const auto a = env.Ones(64).ReinterpretCast<uint8_t>();
    if (env.bad) {
        Cast(env.Fresh<float>(64), a, RoundMode::CAST_NONE, 64);
    } else {
        Cast(env.Fresh<half>(64), a, RoundMode::CAST_NONE, 64);
    }
}
RULE(counter_mode_missing)
{
    const auto a = env.Ones(64);
    if (!env.bad) {
        SetMaskCount();
    }
    SetVectorMask<float, MaskMode::COUNTER>(64);
    Adds<float, false>(a, a, 1.0f, 1);
    SetMaskNorm();
    ResetMask();
}
RULE(counter_mode_left_on)
{
    SetMaskCount();
    if (!env.bad) {
        SetMaskNorm();
    }
    (void)env;
}
RULE(unwritten_vector)
{
    const auto a = env.Ones(64), b = env.Fresh<float>(64);
    Add(b, a, env.bad ? b : a, 64);
}
RULE(unwritten_by_mask)
{
    const auto a = env.Fresh<float>(64);
    Duplicate(a, 1.0f, env.bad ? 63 : 64, 1, 1, 8);
    Adds(a, a, 1.0f, 64);
}
RULE(unwritten_copy_out)
{
    const auto a = env.Fresh<float>(64);
    Duplicate(a, 1.0f, env.bad ? 15 : 16);
    env.Store(env.y, a, 16);
}
RULE(unwritten_scalar)
{
    const auto a = env.Fresh<float>(8);
    a.SetValue(0, 1.0f);
    a.GetValue(env.bad ? 1 : 0);
}
