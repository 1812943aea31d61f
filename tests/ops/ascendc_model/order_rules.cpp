// Rules of order: between pipes, between cores (core_rules.h), and what GM holds.
#include "core_rules.h"
#include "rule.h"
#include "tiling/platform/platform_ascendc.h"

// --- order of pipes ------------------------------------------------------------------------------------------------

RULE(raw_in_to_vector)
{
    const auto a = env.Fresh<float>(64);
    DataCopy(a, env.x, 64);
    if (!env.bad) {
        env.Order<HardEvent::MTE2_V>();
    }
    Adds(a, a, 1.0f, 64);
}
RULE(raw_vector_to_out)
{
    const auto a = env.Ones(64);
    if (!env.bad) {
        env.Order<HardEvent::V_MTE3>();
    }
    DataCopy(env.y, a, 64);
}
RULE(war_vector_to_in)
{
    const auto a = env.Fresh<float>(64), b = env.Fresh<float>(64);
    DataCopy(a, env.x, 64);
    env.Order<HardEvent::MTE2_V>();
    Adds(b, a, 1.0f, 64);
    if (!env.bad) {
        env.Order<HardEvent::V_MTE2>();
    }
    DataCopy(a, env.x[64], 64);
}
RULE(war_out_to_vector)
{
    const auto a = env.Ones(64);
    env.Store(env.y, a, 64);
    if (!env.bad) {
        env.Order<HardEvent::MTE3_V>();
    }
    Duplicate(a, 2.0f, 64);
}
RULE(waw_in_to_vector)
{
    const auto a = env.Fresh<float>(64);
    DataCopy(a, env.x, 64);
    if (!env.bad) {
        env.Order<HardEvent::MTE2_V>();
    }
    Duplicate(a, 2.0f, 64);
}
RULE(wrong_direction)
{
    const auto a = env.Fresh<float>(64);
    DataCopy(a, env.x, 64);
    if (env.bad) {
        env.Order<HardEvent::V_MTE2>();
    } else {
        env.Order<HardEvent::MTE2_V>();
    }
    Adds(a, a, 1.0f, 64);
}
// A flag says nothing about what its source pipe does afterwards.
RULE(flag_set_too_early)
{
    const auto a = env.Fresh<float>(64);
    if (env.bad) {
        SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    }
    DataCopy(a, env.x, 64);
    if (!env.bad) {
        SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
    }
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    Adds(a, a, 1.0f, 64);
}
// Order is transitive: in before vector, vector before out.
RULE(chain)
{
    const auto a = env.Fresh<float>(64), b = env.Ones(64);
    DataCopy(a, env.x, 64);
    if (!env.bad) {
        env.Order<HardEvent::MTE2_V>();
    }
    Adds(b, b, 1.0f, 64);
    env.Order<HardEvent::V_MTE3>();
    DataCopy(env.y, a, 64);
}
// If one pipe may read, that says nothing about another pipe.
RULE(second_reader)
{
    const auto a = env.Fresh<float>(64), b = env.Fresh<float>(64);
    DataCopy(a, env.x, 64);
    env.Order<HardEvent::MTE2_V>();
    Adds(b, a, 1.0f, 64);
    if (!env.bad) {
        env.Order<HardEvent::MTE2_MTE3>();
    }
    DataCopy(env.y, a, 64);
}
RULE(barrier_of_one_pipe)
{
    const auto a = env.Fresh<float>(64);
    DataCopy(a, env.x, 64);
    if (env.bad) {
        PipeBarrier<PIPE_MTE2>();
    } else {
        PipeBarrier<PIPE_ALL>();
    }
    Adds(a, a, 1.0f, 64);
}
RULE(queue_buffers_in_turn)
{
    In queue;
    env.pipe.InitBuffer(queue, 2, 256);
    const auto a = env.Ones(64);
    for (int i = 0; i < 2; ++i) {
        auto b = queue.AllocTensor<float>();
        if (i == 1) {  // the second buffer: its owner has not waited for the vector instruction on the first
            if (!env.bad) {
                PipeBarrier<PIPE_ALL>();
            }
            DataCopy(a, env.x, 64);
        }
        DataCopy(b, env.x, 64);
        queue.EnQue(b);
        b = queue.DeQue<float>();
        Add(b, b, a, 64);
        queue.FreeTensor(b);
    }
}
RULE(queue_not_used_for_order)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 256);
    auto a = queue.AllocTensor<float>();
    DataCopy(a, env.x, 64);
    if (!env.bad) {
        queue.EnQue(a);
        a = queue.DeQue<float>();
    }
    Adds(a, a, 1.0f, 64);
    queue.FreeTensor(a);
}
RULE(waw_in_to_in)
{
    const auto a = env.Fresh<float>(64);
    DataCopy(a, env.x, 64);
    if (!env.bad) {
        PipeBarrier<PIPE_MTE2>();
    }
    DataCopy(a[32], env.x, 32);
}
RULE(waw_out_to_out)
{
    const auto a = env.Ones(64);
    env.Store(env.y, a, 64);
    if (!env.bad) {
        PipeBarrier<PIPE_MTE3>();
    }
    DataCopy(env.y[32], a, 32);
}
RULE(raw_through_gm)
{
    const auto a = env.Ones(128);
    env.Store(env.y, a, 64);
    if (!env.bad) {
        env.Order<HardEvent::MTE3_MTE2>();
    }
    DataCopy(env.Fresh<float>(64), env.y, 64);
}
RULE(manual_vector_barrier)  // with the compiler's own synchronization off
{
    const auto a = env.Ones(64);
    if (!env.bad) {
        PipeBarrier<PIPE_V>();
    }
    Adds(a, a, 1.0f, 64);
}
RULE(manual_scalar_flag)  // with the compiler's own synchronization off
{
    const auto a = env.Ones(64);
    if (!env.bad) {
        env.Order<HardEvent::V_S>();
    }
    a.GetValue(0);
}

// --- flags ---------------------------------------------------------------------------------------------------------

RULE(flag_without_wait)
{
    SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    if (!env.bad) {
        WaitFlag<HardEvent::V_MTE3>(EVENT_ID1);
    }
}
RULE(wait_without_set)
{
    if (!env.bad) {
        SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    }
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID1);
}
RULE(wait_for_another_id)
{
    SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::V_MTE3>(env.bad ? EVENT_ID2 : EVENT_ID1);
}
RULE(set_twice)
{
    SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    if (!env.bad) {
        WaitFlag<HardEvent::V_MTE3>(EVENT_ID1);
    }
    SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID1);
}
RULE(event_id_range)
{
    SetFlag<HardEvent::V_MTE3>(env.bad ? 8 : 7);
    WaitFlag<HardEvent::V_MTE3>(env.bad ? 8 : 7);
}
RULE(event_of_another_core_kind)
{
    if (env.bad) {
        env.Order<HardEvent::M_FIX>();
    } else {
        env.Order<HardEvent::V_MTE3>();
    }
}
RULE(event_id_of_a_queue)
{
    In queue;
    env.pipe.InitBuffer(queue, 2, 64);
    const int32_t id = env.bad ? int32_t{EVENT_ID0} : env.pipe.FetchEventID<HardEvent::MTE2_V>();
    SetFlag<HardEvent::MTE2_V>(id);
    WaitFlag<HardEvent::MTE2_V>(id);
}
RULE(event_id_not_released)
{
    const auto id = env.pipe.AllocEventID<HardEvent::MTE2_V>();
    if (!env.bad) {
        env.pipe.ReleaseEventID<HardEvent::MTE2_V>(id);
    }
}
RULE(event_id_not_allocated)
{
    const auto id = env.pipe.AllocEventID<HardEvent::MTE2_V>();
    env.pipe.ReleaseEventID<HardEvent::MTE2_V>(env.bad ? id + 1 : id);
}
RULE(event_ids_run_out)
{
    TEventID ids[9];
    const int count = env.bad ? 9 : 8;
    for (int i = 0; i < count; ++i) {
        ids[i] = env.pipe.AllocEventID<HardEvent::MTE2_V>();
    }
    for (int i = 0; i < count; ++i) {
        env.pipe.ReleaseEventID<HardEvent::MTE2_V>(ids[i]);
    }
}

// --- GM and atomics ------------------------------------------------------------------------------------------------

RULE(gm_unwritten)
{
    const auto a = env.Fresh<float>(64), b = env.Ones(64);
    if (!env.bad) {
        env.Store(env.y, b, 64);
        env.Order<HardEvent::MTE3_MTE2>();
    }
    DataCopy(a, env.y, 64);
}
RULE(gm_scalar_after_write)
{
    env.Store(env.y, env.Ones(64), 64);
    (env.bad ? env.y : env.x).GetValue(3);
}
RULE(atomic_on_unwritten)
{
    const auto a = env.Ones(64);
    env.Order<HardEvent::V_MTE3>();
    if (!env.bad) {
        DataCopy(env.y, a, 64);
        PipeBarrier<PIPE_MTE3>();
    }
    SetAtomicAdd<float>();
    DataCopy(env.y, a, 64);
    DisableDmaAtomic();
}
RULE(atomic_of_another_type)
{
    const auto a = env.Ones(64);
    env.Order<HardEvent::V_MTE3>();
    if (env.bad) {
        SetAtomicAdd<half>();
    } else {
        SetAtomicAdd<float>();
    }
    DataCopy(env.y, a, 64);
    SetAtomicNone();
}
RULE(atomic_left_on)
{
    SetAtomicAdd<float>();
    if (!env.bad) {
        SetAtomicNone();
    }
}

// The host's tiling sees the numbers that the model checks.
void platform_sizes(GM_ADDR sizes)
{
    using platform_ascendc::CoreMemType;
    const auto* platform = platform_ascendc::PlatformAscendCManager::GetInstance();
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 64);
    LocalTensor<uint64_t> out = buffer.Get<uint64_t>();
    const CoreMemType types[] = {
        CoreMemType::UB, CoreMemType::L1, CoreMemType::L0_A, CoreMemType::L0_B, CoreMemType::L0_C};
    for (int i = 0; i < 8; ++i) {
        uint64_t size = 0;
        if (i < 5) {
            platform->GetCoreMemSize(types[i], size);
        }
        out.SetValue(i, size);
    }
    GlobalTensor<uint64_t> gm;
    gm.SetGlobalBuffer((__gm__ uint64_t*)sizes, 8);
    DataCopy(gm, out, 8);
}
ASCENDC_MODEL_KERNEL(platform_sizes);
