// Rules of copies, buffers and queues.
#include "rule.h"

// --- copies --------------------------------------------------------------------------------------------------------

RULE(copy_length) { DataCopy(env.Fresh<float>(64), env.x, env.bad ? 12 : 16); }
RULE(copy_address) { DataCopy(env.Fresh<float>(64)[env.bad ? 4 : 8], env.x, 16); }
RULE(copy_block_count)
{
    DataCopyParams params;
    params.blockCount = env.bad ? 4096 : 4;
    params.blockLen = 1;
    DataCopy(env.Fresh<float>(64), env.x, params);
}
RULE(field_overflow)
{
    DataCopyParams params;
    params.blockLen = env.bad ? 65536 : 1;  // as uint16_t this would be 0
    DataCopy(env.Fresh<float>(64), env.x, params);
}
RULE(copy_on_chip_overlap)
{
    const auto a = env.Ones(64);
    DataCopy(a[env.bad ? 8 : 32], a, 16);
}
RULE(gm_read_past_end) { DataCopy(env.Fresh<float>(64), env.x[env.bad ? 1016 : 1008], 16); }
RULE(gm_read_before_start) { DataCopy(env.Fresh<float>(64), env.x[env.bad ? -8 : 0], 16); }
RULE(gm_write_past_end) { env.Store(env.y[env.bad ? 1016 : 1008], env.Ones(64), 16); }
RULE(gm_write_to_input) { env.Store(env.bad ? env.x : env.y, env.Ones(64), 16); }
RULE(gm_declared_too_long)
{
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(env.x.GetPhyAddr(512), env.bad ? 520 : 512);
}
RULE(gm_misaligned)
{
    GlobalTensor<half> tensor;
    tensor.SetGlobalBuffer((__gm__ half*)((__gm__ uint8_t*)env.x.GetPhyAddr(0) + (env.bad ? 1 : 2)));
}
RULE(gm_unregistered)
{
    static float elsewhere[1 << 20];
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(env.bad ? elsewhere : nullptr);
}
RULE(pad_element) { DataCopyPad(env.Fresh<float>(64), env.x, {1, env.bad ? 6u : 8u, 0, 0, 0}, {false, 0, 0, 0.0f}); }
RULE(pad_block_count) { DataCopyPad(env.Fresh<float>(64), env.x, {env.bad ? 4096 : 2, 4, 0, 0, 0}, {}); }
RULE(pad_block_len) { DataCopyPad(env.Fresh<float>(64), env.x, {1, env.bad ? 2097152 : 4, 0, 0, 0}, {}); }
RULE(pad_left) { DataCopyPad(env.Fresh<float>(64), env.x, {1, 4, 0, 0, 0}, {true, env.bad ? 9 : 8, 0, 0.0f}); }
RULE(pad_right) { DataCopyPad(env.Fresh<float>(64), env.x, {1, 4, 0, 0, 0}, {true, 0, env.bad ? 9 : 8, 0.0f}); }
// The stride of the UB side is in data blocks: 32 would be 1024 bytes.
RULE(pad_ub_stride) { DataCopyPad(env.Fresh<float>(64), env.x, {4, 32, 0, env.bad ? 32 : 1, 0}, {}); }
// The stride of the GM side is in bytes.
RULE(pad_gm_stride) { DataCopyPad(env.Fresh<float>(64), env.x, {4, 32, env.bad ? 2048 : 64, 0, 0}, {}); }
RULE(pad_random_filling)
{
    const auto a = env.Fresh<float>(64);
    DataCopyPad(a, env.x, {1, 12, 0, 0, 0}, {!env.bad, 1, 0, 0.0f});
    env.Order<HardEvent::MTE2_V>();
    Adds(a, a, 1.0f, 4);
}

// --- buffers -------------------------------------------------------------------------------------------------------

RULE(ub_capacity) { env.Fresh<float>(env.bad ? 196384 / 4 : 196352 / 4); }
template <TPosition position>
void Capacity(Env& env, uint32_t bytes)
{
    TBuf<position> buffer;
    env.pipe.InitBuffer(buffer, env.bad ? bytes + 32 : bytes);
}
RULE(l1_capacity) { Capacity<TPosition::A1>(env, 524032); }
RULE(l0a_capacity) { Capacity<TPosition::A2>(env, 64 * 1024); }
RULE(l0b_capacity) { Capacity<TPosition::B2>(env, 64 * 1024); }
RULE(l0c_capacity) { Capacity<TPosition::CO1>(env, 128 * 1024); }
RULE(beyond_buffer) { Duplicate(env.Fresh<float>(64), 1.0f, env.bad ? 65 : 64); }
RULE(beyond_tensor) { env.Fresh<float>(64)[env.bad ? 65 : 64]; }
RULE(buf_get)
{
    TBuf<> buffer;
    env.pipe.InitBuffer(buffer, 64);
    buffer.Get<float>(env.bad ? 17 : 16);
}
RULE(buf_without_memory)
{
    TBuf<> buffer;
    if (!env.bad) {
        env.pipe.InitBuffer(buffer, 64);
    }
    buffer.Get<float>();
}
RULE(two_pipes)
{
    if (env.bad) {
        TPipe second;
    }
}
RULE(many_buffers)
{
    for (int i = 0; i < (env.bad ? 65 : 64); ++i) {
        env.Fresh<float>(8);
    }
}

// --- queues --------------------------------------------------------------------------------------------------------

RULE(queue_depth)
{
    In queue;
    env.pipe.InitBuffer(queue, 2, 64);
    auto a = queue.AllocTensor<float>();
    auto b = queue.AllocTensor<float>();
    queue.EnQue(a);
    if (env.bad) {
        queue.EnQue(b);
    }
    a = queue.DeQue<float>();
    queue.FreeTensor(a);
    queue.FreeTensor(b);
}
RULE(queue_no_buffer_left)
{
    In queue;
    env.pipe.InitBuffer(queue, env.bad ? 1 : 2, 64);
    auto a = queue.AllocTensor<float>();
    auto b = queue.AllocTensor<float>();
    queue.FreeTensor(a);
    queue.FreeTensor(b);
}
RULE(queue_empty)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 64);
    auto a = queue.AllocTensor<float>();
    if (!env.bad) {
        queue.EnQue(a);
    }
    a = queue.DeQue<float>();
    queue.FreeTensor(a);
}
RULE(queue_freed_twice)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 64);
    auto a = queue.AllocTensor<float>();
    queue.FreeTensor(a);
    if (env.bad) {
        queue.FreeTensor(a);
    }
}
RULE(queue_enqueued_twice)
{
    TQue<TPosition::VECIN, 2> queue;
    env.pipe.InitBuffer(queue, 2, 64);
    auto a = queue.AllocTensor<float>();
    queue.EnQue(a);
    if (env.bad) {
        queue.EnQue(a);
    }
    a = queue.DeQue<float>();
    queue.FreeTensor(a);
}
RULE(queue_used_after_free)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 64);
    auto a = queue.AllocTensor<float>();
    if (!env.bad) {
        DataCopy(a, env.x, 16);
    }
    queue.FreeTensor(a);
    if (env.bad) {
        DataCopy(a, env.x, 16);
    }
}
RULE(queue_used_after_enque)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 64);
    auto a = queue.AllocTensor<float>();
    DataCopy(a, env.x, 16);
    queue.EnQue(a);
    auto b = queue.DeQue<float>();
    Adds(b, env.bad ? a : b, 1.0f, 16);
    queue.FreeTensor(b);
}
RULE(queue_leak)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 64);
    auto a = queue.AllocTensor<float>();
    if (!env.bad) {
        queue.FreeTensor(a);
    }
}
RULE(queue_never_dequeued)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 64);
    auto a = queue.AllocTensor<float>();
    queue.EnQue(a);
    if (!env.bad) {
        a = queue.DeQue<float>();
        queue.FreeTensor(a);
    }
}
RULE(queue_foreign_tensor)
{
    In first, second;
    env.pipe.InitBuffer(first, 1, 64);
    env.pipe.InitBuffer(second, 1, 64);
    auto a = first.AllocTensor<float>();
    if (env.bad) {
        second.FreeTensor(a);
    }
    first.FreeTensor(a);
}
RULE(queue_part_of_a_tensor)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 64);
    auto a = queue.AllocTensor<float>();
    auto part = a[env.bad ? 8 : 0];
    queue.FreeTensor(part);
}
RULE(queue_without_buffers)
{
    In queue;
    if (!env.bad) {
        env.pipe.InitBuffer(queue, 1, 64);
    }
    auto a = queue.AllocTensor<float>();
    queue.FreeTensor(a);
}
RULE(queue_events)
{
    In queue;
    env.pipe.InitBuffer(queue, env.bad ? 9 : 8, 64);
}
RULE(queue_events_of_a_cube_core)
{
    if ASCEND_IS_AIC {
        TQue<TPosition::A2, 1> left;
        TQue<TPosition::B2, 1> right;
        env.pipe.InitBuffer(left, 2, 512);
        env.pipe.InitBuffer(right, env.bad ? 4 : 3, 512);
    }
}
RULE(event_id_of_the_pipe)
{
    if ASCEND_IS_AIC {
        const TEventID id = env.bad ? 2 : 3;
        SetFlag<HardEvent::M_MTE1>(id);
        WaitFlag<HardEvent::M_MTE1>(id);
    }
}
RULE(queue_poisons_at_free)
{
    In queue;
    env.pipe.InitBuffer(queue, 1, 64);
    auto a = queue.AllocTensor<float>();
    DataCopy(a, env.x, 16);
    queue.EnQue(a);
    a = queue.DeQue<float>();
    if (env.bad) {
        queue.FreeTensor(a);
        a = queue.AllocTensor<float>();
        queue.EnQue(a);
        a = queue.DeQue<float>();
    }
    Adds(a, a, 1.0f, 16);
    queue.FreeTensor(a);
}
