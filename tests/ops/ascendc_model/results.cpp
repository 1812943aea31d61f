// Kernels of one core whose results are compared with NumPy's. Products are in cube_results.h, and kernels of several
// cores in core_results.h.
#include "core_results.h"
#include "cube_results.h"
#include "kernel_operator.h"
#include "model/python_entry.h"

using namespace AscendC;

// z = x + y with double buffering and a ragged tail, the rows of `length` split over the cores.
struct AddTiling {
    uint32_t length;
    uint32_t perCore;
    uint32_t tile;
};

extern "C" __global__ __aicore__ void add(GM_ADDR x, GM_ADDR y, GM_ADDR z, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(AddTiling);
    GET_TILING_DATA(t, tiling);
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    const uint32_t begin = std::min<uint32_t>(GetBlockIdx() * t.perCore, t.length);
    const uint32_t end = std::min(begin + t.perCore, t.length);
    GlobalTensor<half> xGm, yGm, zGm;
    xGm.SetGlobalBuffer((__gm__ half*)x + begin, end - begin);
    yGm.SetGlobalBuffer((__gm__ half*)y + begin, end - begin);
    zGm.SetGlobalBuffer((__gm__ half*)z + begin, end - begin);
    TPipe pipe;
    TQue<TPosition::VECIN, 1> xQueue, yQueue;
    TQue<TPosition::VECOUT, 1> zQueue;
    pipe.InitBuffer(xQueue, 2, t.tile * sizeof(half));
    pipe.InitBuffer(yQueue, 2, t.tile * sizeof(half));
    pipe.InitBuffer(zQueue, 2, t.tile * sizeof(half));
    for (uint32_t at = 0; at < end - begin; at += t.tile) {
        const uint32_t count = std::min(t.tile, end - begin - at);
        const DataCopyExtParams copy(1, count * sizeof(half), 0, 0, 0);
        const DataCopyPadExtParams<half> pad(false, 0, 0, half(0.0f));
        LocalTensor<half> xIn = xQueue.AllocTensor<half>();
        LocalTensor<half> yIn = yQueue.AllocTensor<half>();
        DataCopyPad(xIn, xGm[at], copy, pad);
        DataCopyPad(yIn, yGm[at], copy, pad);
        xQueue.EnQue(xIn);
        yQueue.EnQue(yIn);
        LocalTensor<half> a = xQueue.DeQue<half>();
        LocalTensor<half> b = yQueue.DeQue<half>();
        LocalTensor<half> sum = zQueue.AllocTensor<half>();
        Add(sum, a, b, static_cast<int32_t>(count));
        zQueue.EnQue(sum);
        xQueue.FreeTensor(a);
        yQueue.FreeTensor(b);
        LocalTensor<half> out = zQueue.DeQue<half>();
        DataCopyPad(zGm[at], out, copy);
        zQueue.FreeTensor(out);
    }
}
ASCENDC_MODEL_KERNEL(add);

// One vector core: n numbers in, f(in, out, n) on PIPE_V, m numbers out.
template <class In, class Out, class F>
void Apply(GM_ADDR x, GM_ADDR y, uint32_t n, uint32_t m, const F& f)
{
    GlobalTensor<In> xGm;
    GlobalTensor<Out> yGm;
    xGm.SetGlobalBuffer((__gm__ In*)x);
    yGm.SetGlobalBuffer((__gm__ Out*)y);
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 1, n * sizeof(In));
    pipe.InitBuffer(out, 1, m * sizeof(Out));
    LocalTensor<In> a = in.AllocTensor<In>();
    DataCopyPad(a, xGm, DataCopyExtParams(1, n * sizeof(In), 0, 0, 0), DataCopyPadExtParams<In>());
    in.EnQue(a);
    a = in.DeQue<In>();
    LocalTensor<Out> b = out.AllocTensor<Out>();
    f(a, b, pipe);
    in.FreeTensor(a);
    out.EnQue(b);
    b = out.DeQue<Out>();
    DataCopyPad(yGm, b, DataCopyExtParams(1, m * sizeof(Out), 0, 0, 0));
    out.FreeTensor(b);
}

struct CastTiling {
    int32_t count;
    int32_t mode;
};

template <class In, class Out>
void CastAll(GM_ADDR x, GM_ADDR y, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(CastTiling);
    GET_TILING_DATA_WITH_STRUCT(CastTiling, t, tiling);
    Apply<In, Out>(x, y, t.count, t.count, [&](const auto& a, const auto& b, TPipe&) {
        Cast(b, a, static_cast<RoundMode>(t.mode), static_cast<uint32_t>(t.count));
    });
}

void cast_half_float(GM_ADDR x, GM_ADDR y, GM_ADDR t) { CastAll<half, float>(x, y, t); }
void cast_bf16_float(GM_ADDR x, GM_ADDR y, GM_ADDR t) { CastAll<bfloat16_t, float>(x, y, t); }
void cast_float_half(GM_ADDR x, GM_ADDR y, GM_ADDR t) { CastAll<float, half>(x, y, t); }
void cast_float_bf16(GM_ADDR x, GM_ADDR y, GM_ADDR t) { CastAll<float, bfloat16_t>(x, y, t); }
void cast_float_int(GM_ADDR x, GM_ADDR y, GM_ADDR t) { CastAll<float, int32_t>(x, y, t); }
void cast_int_float(GM_ADDR x, GM_ADDR y, GM_ADDR t) { CastAll<int32_t, float>(x, y, t); }
void cast_half_bf16(GM_ADDR x, GM_ADDR y, GM_ADDR t) { CastAll<half, bfloat16_t>(x, y, t); }
ASCENDC_MODEL_KERNEL(cast_half_float);
ASCENDC_MODEL_KERNEL(cast_bf16_float);
ASCENDC_MODEL_KERNEL(cast_float_half);
ASCENDC_MODEL_KERNEL(cast_float_bf16);
ASCENDC_MODEL_KERNEL(cast_float_int);
ASCENDC_MODEL_KERNEL(cast_int_float);
ASCENDC_MODEL_KERNEL(cast_half_bf16);

// Element-wise instructions on half: op chooses one.
struct OpTiling {
    int32_t count;
    int32_t op;
};

template <class T>
void Elementwise(GM_ADDR x, GM_ADDR y, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(OpTiling);
    GET_TILING_DATA_WITH_STRUCT(OpTiling, t, tiling);
    const int32_t n = t.count;
    Apply<T, T>(x, y, 2 * n, n, [&](const auto& a, const auto& b, TPipe&) {
        switch (t.op) {
            case 0: Add(b, a, a[n], n); break;
            case 1: Sub(b, a, a[n], n); break;
            case 2: Mul(b, a, a[n], n); break;
            case 3: Adds(b, a, T(1.5f), n); break;
            case 4: Muls(b, a, T(0.1f), n); break;
            case 5:
                DataCopy(b, a, n);
                Axpy(b, a[n], T(0.3f), n);
                break;
            case 6:
                DataCopy(b, a, n);
                MulAddDst(b, a, a[n], n);
                break;
            default: Duplicate(b, T(2.0f), n);
        }
    });
}
void elementwise_half(GM_ADDR x, GM_ADDR y, GM_ADDR t) { Elementwise<half>(x, y, t); }
void elementwise_float(GM_ADDR x, GM_ADDR y, GM_ADDR t) { Elementwise<float>(x, y, t); }
ASCENDC_MODEL_KERNEL(elementwise_half);
ASCENDC_MODEL_KERNEL(elementwise_float);

// dst (float) += half * half, and masks, strides and broadcasts.
void mixed(GM_ADDR x, GM_ADDR y)
{
    Apply<half, float>(x, y, 256, 128, [](const auto& a, const auto& b, TPipe&) {
        Duplicate(b, 1.0f, 128);
        Axpy(b, a, half(0.5f), 64);
        MulAddDst(b[64], a[64], a[128], 64, 1, {1, 1, 1, 8, 4, 4});
    });
}
ASCENDC_MODEL_KERNEL(mixed);

// 8 rows of 64: row sums over the last axis by a mask of 40 lanes; every second row left out by strides.
void masked_rows(GM_ADDR x, GM_ADDR y)
{
    Apply<float, float>(x, y, 512, 8, [](const auto& a, const auto& b, TPipe&) {
        Duplicate(b, 0.0f, 8);
        WholeReduceSum(b, a, 40, 4, 2, 1, 16);
    });
}
ASCENDC_MODEL_KERNEL(masked_rows);

// y = bit mask: of 64 lanes only those set; two repeats; then counter mode over 70 numbers.
void bit_mask(GM_ADDR x, GM_ADDR y)
{
    Apply<float, float>(x, y, 128, 128, [](const auto& a, const auto& b, TPipe&) {
        Duplicate(b, 0.0f, 128);
        uint64_t mask[2] = {0xF0F0F0F0F0F0F0F0u, 0};
        Muls(b, a, 2.0f, mask, 2, {1, 1, 8, 8});
        SetMaskCount();
        SetVectorMask<float, MaskMode::COUNTER>(70);
        Adds<float, false>(b, b, 1.0f, MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
        SetMaskNorm();
        ResetMask();
    });
}
ASCENDC_MODEL_KERNEL(bit_mask);

template <class T>
void Reduce(GM_ADDR x, GM_ADDR y, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(OpTiling);
    GET_TILING_DATA_WITH_STRUCT(OpTiling, t, tiling);
    constexpr int32_t lanes = 256 / sizeof(T);
    const int32_t n = t.count;
    const int32_t repeats = n / lanes;
    const int32_t outputs[] = {1, 1, repeats, 8 * repeats, n / 2};
    Apply<T, T>(x, y, n, outputs[t.op], [&](const auto& a, const auto& b, TPipe& pipe) {
        TBuf<TPosition::VECCALC> scratch;
        pipe.InitBuffer(scratch, 4096);
        LocalTensor<T> work = scratch.Get<T>();
        switch (t.op) {
            case 0: ReduceSum(b, a, work, n); break;
            case 1: ReduceSum<T>(b, a, work, lanes, repeats, 8); break;
            case 2: WholeReduceSum(b, a, lanes, repeats, 1, 1, 8); break;
            case 3: BlockReduceSum(b, a, repeats, lanes, 1, 1, 8); break;
            default: PairReduceSum(b, a, repeats, lanes, 1, 1, 8);
        }
    });
}
void reduce_half(GM_ADDR x, GM_ADDR y, GM_ADDR t) { Reduce<half>(x, y, t); }
void reduce_float(GM_ADDR x, GM_ADDR y, GM_ADDR t) { Reduce<float>(x, y, t); }
ASCENDC_MODEL_KERNEL(reduce_half);
ASCENDC_MODEL_KERNEL(reduce_float);

// 16 numbers, each broadcast over a data block; then every second block copied out by Copy.
void broadcast(GM_ADDR x, GM_ADDR y)
{
    Apply<float, float>(x, y, 16, 64, [](const auto& a, const auto& b, TPipe& pipe) {
        TBuf<TPosition::VECCALC> scratch;
        pipe.InitBuffer(scratch, 512);
        LocalTensor<float> wide = scratch.Get<float>(128);
        Brcb(wide, a, 2, {1, 8});
        Copy(b, wide, 64, 1, {1, 2, 8, 8});
    });
}
ASCENDC_MODEL_KERNEL(broadcast);

// The number in each of 64 bytes, as half; then looked up in a table of 256, which starts after 8 other numbers.
void look_up(GM_ADDR x, GM_ADDR table, GM_ADDR y)
{
    GlobalTensor<half> tableGm;
    tableGm.SetGlobalBuffer((__gm__ half*)table, 264);
    Apply<uint8_t, half>(x, y, 64, 128, [&](const auto& a, const auto& b, TPipe& pipe) {
        TQue<TPosition::VECIN, 1> queue;
        TBuf<> scratch, wide;
        pipe.InitBuffer(queue, 1, 544);
        pipe.InitBuffer(scratch, 64 * sizeof(half));
        pipe.InitBuffer(wide, 64 * sizeof(int32_t));
        LocalTensor<half> entries = queue.AllocTensor<half>();
        DataCopyPad(entries, tableGm, DataCopyExtParams(1, 528, 0, 0, 0), DataCopyPadExtParams<half>());
        queue.EnQue(entries);
        entries = queue.DeQue<half>();
        Cast(b, a, RoundMode::CAST_NONE, 64);
        LocalTensor<half> twice = scratch.Get<half>();
        LocalTensor<int32_t> offsets = wide.Get<int32_t>();
        Muls(twice, b, half(2.0f), 64);
        Cast(offsets, twice, RoundMode::CAST_RINT, 64);
        Gather(b[64], entries, offsets.ReinterpretCast<uint32_t>(), 16, 64);
        queue.FreeTensor(entries);
    });
}
ASCENDC_MODEL_KERNEL(look_up);

// Blocks with strides, and padding to the left and right: 3 rows of 5 of a 3 x 7 matrix into rows of 8.
void padded(GM_ADDR x, GM_ADDR y)
{
    GlobalTensor<float> xGm, yGm;
    xGm.SetGlobalBuffer((__gm__ float*)x, 21);
    yGm.SetGlobalBuffer((__gm__ float*)y, 24);
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
    pipe.InitBuffer(queue, 1, 5 * 32);
    LocalTensor<float> rows = queue.AllocTensor<float>();
    DataCopyPad(rows, xGm, {3, 5 * sizeof(float), 2 * sizeof(float), 1, 0}, {true, 1, 2, -1.0f});
    queue.EnQue(rows);
    rows = queue.DeQue<float>();
    DataCopy(yGm, rows, DataCopyParams(3, 1, 1, 0));
    queue.FreeTensor(rows);
}
ASCENDC_MODEL_KERNEL(padded);

// Without padding the tail of the last data block repeats the block's first number.
void tails(GM_ADDR x, GM_ADDR y)
{
    GlobalTensor<float> xGm, yGm;
    xGm.SetGlobalBuffer((__gm__ float*)x, 6);
    yGm.SetGlobalBuffer((__gm__ float*)y, 16);
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
    pipe.InitBuffer(queue, 1, 64);
    LocalTensor<float> rows = queue.AllocTensor<float>();
    DataCopyPad(rows, xGm, {2, 3 * sizeof(float), 0, 0, 0}, {false, 0, 0, 0.0f});
    queue.EnQue(rows);
    rows = queue.DeQue<float>();
    DataCopy(yGm, rows, 16);
    queue.FreeTensor(rows);
}
ASCENDC_MODEL_KERNEL(tails);

// Lanes 0 to 31 of each repeat by the mask register in normal mode.
void register_mask(GM_ADDR x, GM_ADDR y)
{
    Apply<float, float>(x, y, 128, 128, [](const auto& a, const auto& b, TPipe&) {
        Duplicate(b, 0.0f, 128);
        SetVectorMask<float, MaskMode::NORMAL>(32);
        Muls<float, false>(b, a, 2.0f, MASK_PLACEHOLDER, 2, {1, 1, 8, 8});
        SetVectorMask<float, MaskMode::NORMAL>(0, 1);
        Adds<float, false>(b, b, 1.0f, MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
        ResetMask();
    });
}
ASCENDC_MODEL_KERNEL(register_mask);
