// Rules of order between cores: who may read and write GM when, flags across cores, and what each kind of core runs.
#pragma once

#include "rule.h"

RULE(two_writers) { env.Store(env.y[env.bad ? 0 : GetBlockIdx() * 64], env.Ones(64), 64); }
RULE(atomic_and_plain)
{
    const auto a = env.Ones(64);
    env.Order<HardEvent::V_MTE3>();
    if (GetBlockIdx() == 0) {
        DataCopy(env.y, a, 64);
    }
    if (!env.bad) {
        SyncAll();
    }
    SetAtomicAdd<float>();
    if (GetBlockIdx() != 0) {
        DataCopy(env.y, a, 64);
    }
    SetAtomicNone();
}
RULE(read_without_sync)
{
    const auto a = env.Ones(64);
    env.Store(env.y[GetBlockIdx() * 64], a, 64);
    if (!env.bad) {
        CrossCoreSetFlag<0, PIPE_MTE3>(1);
        CrossCoreWaitFlag(1);
    }
    env.Order<HardEvent::MTE3_MTE2>();
    if (GetBlockIdx() == 1) {
        DataCopy(env.Fresh<float>(64), env.y, 64);
    }
}
// The flag must be set after the pipe that writes.
RULE(flag_of_another_pipe)
{
    const auto a = env.Ones(64);
    env.Store(env.y[GetBlockIdx() * 64], a, 64);
    if (env.bad) {
        CrossCoreSetFlag<0, PIPE_V>(1);
    } else {
        CrossCoreSetFlag<0, PIPE_MTE3>(1);
    }
    CrossCoreWaitFlag(1);
    DataCopy(env.Fresh<float>(64), env.y[(1 - GetBlockIdx()) * 64], 64);
}
// Readers must be done before another core writes there again.
RULE(write_after_read)
{
    const auto a = env.Ones(64);
    if (GetBlockIdx() == 0) {
        env.Store(env.y, a, 64);
    }
    SyncAll();
    if (GetBlockIdx() == 1) {
        DataCopy(env.Fresh<float>(64), env.y, 64);
    }
    if (!env.bad) {
        SyncAll();
    }
    if (GetBlockIdx() == 0) {
        DataCopy(env.y, a, 64);
    }
}
RULE(sync_in_vector_only_kernel)
{
    if (env.bad) {
        SyncAll();
    }
}
RULE(sync_not_by_all)
{
    if (!env.bad || GetBlockIdx() != 1) {
        SyncAll();
    }
}
RULE(cross_flag_never_set)
{
    if (!env.bad) {
        CrossCoreSetFlag<0, PIPE_MTE3>(1);
    }
    CrossCoreWaitFlag(1);
}
RULE(cross_flag_not_waited_for)
{
    CrossCoreSetFlag<0, PIPE_MTE3>(1);
    if (!env.bad) {
        CrossCoreWaitFlag(1);
    }
}
RULE(cross_flag_not_answered)
{
    if (!env.bad || GetBlockIdx() == 0) {
        CrossCoreSetFlag<0, PIPE_MTE3>(1);
    }
    if (!env.bad) {
        CrossCoreWaitFlag(1);
    }
}
RULE(cross_flag_range)
{
    CrossCoreSetFlag<0, PIPE_MTE3>(env.bad ? 16 : 15);
    CrossCoreWaitFlag(env.bad ? 16 : 15);
}
RULE(cross_flag_of_sync_all)
{
    CrossCoreSetFlag<0, PIPE_MTE3>(env.bad ? 12 : 1);
    CrossCoreWaitFlag(env.bad ? 12 : 1);
    SyncAll();
}
RULE(cross_flag_counter)
{
    for (int i = 0; i < (env.bad ? 16 : 15); ++i) {
        CrossCoreSetFlag<0, PIPE_MTE3>(1);
    }
    for (int i = 0; i < (env.bad ? 16 : 15); ++i) {
        CrossCoreWaitFlag(1);
    }
}
RULE(more_cores_than_the_chip_has)  // with 49 blocks
{
    if (env.bad) {
        SyncAll();
    }
}
RULE(mix_needs_all_vectors)
{
    if ASCEND_IS_AIV {
        if (!env.bad || GetSubBlockIdx() == 0) {
            CrossCoreSetFlag<2, PIPE_MTE3>(1);
        }
    } else {
        CrossCoreWaitFlag(1);
    }
}
RULE(mix_vector_on_cube)
{
    if (env.bad || !ASCEND_IS_AIC) {
        env.Ones(64);
    }
}
RULE(mix_cube_pipe_on_vector)
{
    if (env.bad || ASCEND_IS_AIC) {
        PipeBarrier<PIPE_M>();
    }
}
RULE(mix_sync_of_vectors_on_cube)
{
    if (env.bad || !ASCEND_IS_AIC) {
        SyncAll();
    }
}
RULE(mix_vectors_meet)
{
    if ASCEND_IS_AIV {
        env.Store(env.y[GetSubBlockIdx() * 64], env.Ones(64), 64);
        if (!env.bad) {
            CrossCoreSetFlag<1, PIPE_MTE3>(1);
            CrossCoreWaitFlag(1);
        }
        DataCopy(env.Fresh<float>(64), env.y[(1 - GetSubBlockIdx()) * 64], 64);
    }
}
RULE(mix_all_meet)
{
    if (ASCEND_IS_AIV) {
        env.Store(env.y[GetSubBlockIdx() * 64], env.Ones(64), 64);
    }
    if (!env.bad) {
        SyncAll<false>();
    }
    if (ASCEND_IS_AIC) {
        TBuf<TPosition::A1> buffer;
        env.pipe.InitBuffer(buffer, 512);
        DataCopy(buffer.Get<float>(), env.y, 128);
    }
}
RULE(kernel_type) { KERNEL_TASK_TYPE_DEFAULT(env.bad ? KERNEL_TYPE_AIC_ONLY : KERNEL_TYPE_AIV_ONLY); }
