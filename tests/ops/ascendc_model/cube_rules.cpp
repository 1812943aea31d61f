// A product on the cube with explicit flags, broken in one way at a time: kNothing is correct, the others are named
// below.
#include "kernel_operator.h"
#include "model/python_entry.h"

using namespace AscendC;

enum Break : int32_t {
    kNothing,
    kNoFlagToL1,
    kNoFlagToCube,
    kNoFlagToFixpipe,
    kNoBarrier,
    kL0Refilled,
    kL0Address,
    kL0cAddress,
    kUnwrittenL1,
    kUnwrittenL0,
    kUnwrittenL0c,
    kFixpipeRows,
    kFixpipeColumns,
    kQuantization,
    kNoLineStride,
    kNoRowStride,
    kTooManyRows,
    kWrongSpace,
    kTransposedFloat,
    kGmTooShort,
    kVectorEvent,
    kBias,
    kCopyToGm,
    kOverlappingGroups
};

template <HardEvent event>
void Order(bool leftOut)
{
    if (!leftOut) {
        SetFlag<event>(EVENT_ID0);
        WaitFlag<event>(EVENT_ID0);
    }
}

// C [size, size] = A [size, 32] B^T, with B as [size, 32], in two steps of 16.
void Product(GM_ADDR a, GM_ADDR b, GM_ADDR c, uint32_t size, int32_t broken)
{
    const uint32_t fractals = size / 16, bytes = size * 32 * 2;
    GlobalTensor<half> aGm, bGm;
    GlobalTensor<float> cGm;
    aGm.SetGlobalBuffer((__gm__ half*)a);
    bGm.SetGlobalBuffer((__gm__ half*)b);
    cGm.SetGlobalBuffer((__gm__ float*)c);
    TPipe pipe;
    TBuf<TPosition::A1> a1Buffer;
    TBuf<TPosition::B1> b1Buffer;
    TBuf<TPosition::A2> a2Buffer;
    TBuf<TPosition::B2> b2Buffer;
    TBuf<TPosition::CO1> cBuffer;
    pipe.InitBuffer(a1Buffer, bytes);
    pipe.InitBuffer(b1Buffer, bytes);
    pipe.InitBuffer(a2Buffer, bytes + 512);
    pipe.InitBuffer(b2Buffer, bytes);
    pipe.InitBuffer(cBuffer, size * size * 4 + 1024);
    LocalTensor<half> a1 = a1Buffer.Get<half>(), b1 = b1Buffer.Get<half>();
    LocalTensor<half> a2 = a2Buffer.Get<half>(), b2 = b2Buffer.Get<half>();
    LocalTensor<float> sum = cBuffer.Get<float>();

    const auto rows = static_cast<uint16_t>(size);
    Nd2NzParams toNz(1, rows, 32, 0, 32, rows, 1, 0);
    if (broken == kNoLineStride) {
        toNz.dstNzNStride = 0;
    }
    if (broken == kOverlappingGroups) {
        toNz.dstNzC0Stride = size - 1;
    }
    if (broken == kUnwrittenL1) {
        toNz.nValue = size - 1;
    }
    DataCopy(a1, aGm, toNz);
    DataCopy(b1, bGm[broken == kGmTooShort ? 16 : 0], Nd2NzParams(1, rows, 32, 0, 32, rows, 1, 0));
    Order<HardEvent::MTE2_MTE1>(broken == kNoFlagToL1);
    if (broken == kTransposedFloat) {
        LoadData(a2.ReinterpretCast<float>(), a1.ReinterpretCast<float>(), LoadData2DParams(0, 1, 1, 0, 0, true, 0));
    }
    const uint32_t step = fractals * 256;
    for (uint32_t row = 0; row < fractals; ++row) {
        LoadData(a2[row * 256 + (broken == kL0Address ? 16 : 0)], a1[row * 256],
            LoadData2DParams(0, 2, fractals, 0, fractals - 1, false, 0));
    }
    LoadData(broken == kWrongSpace ? a1 : b2, b1, LoadData2DParams(0, 2 * fractals, 1, 0, 0, false, 0));
    Order<HardEvent::MTE1_M>(broken == kNoFlagToCube);
    if (broken == kVectorEvent) {
        Order<HardEvent::S_V>(false);
    }

    MmadParams mmad;
    mmad.m = broken == kTooManyRows ? 4096 : size;
    mmad.n = size;
    mmad.k = broken == kUnwrittenL0 ? 48 : 16;
    mmad.cmatrixInitVal = broken != kUnwrittenL0c;
    mmad.isBias = broken == kBias;
    LocalTensor<float> target = sum[broken == kL0cAddress ? 128 : 0];
    Mmad(target, a2, b2, mmad);
    if (broken == kL0Refilled) {
        LoadData(a2, a1, LoadData2DParams(0, 1, 1, 0, 0, false, 0));
    }
    if (size < 64 && broken != kNoBarrier) {
        PipeBarrier<PIPE_M>();
    }
    mmad.cmatrixInitVal = false;
    Mmad(target, a2[step], b2[step], mmad);
    Order<HardEvent::M_FIX>(broken == kNoFlagToFixpipe);

    FixpipeParamsV220 fix;
    fix.mSize = broken == kFixpipeRows ? 2 * size : size;
    fix.nSize = broken == kFixpipeColumns ? size + 16 : size;
    fix.srcStride = size;
    fix.dstStride = broken == kNoRowStride ? size - 1 : uint32_t{fix.nSize};
    fix.quantPre = broken == kQuantization ? F322F16 : NoQuant;
    Fixpipe(cGm, sum, fix);
    if (broken == kCopyToGm) {
        DataCopy(cGm, sum, 16);
    }
}

void product(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(int32_t);
    GET_TILING_DATA_WITH_STRUCT(int32_t, broken, tiling);
    Product(a, b, c, 32, broken);
}
ASCENDC_MODEL_KERNEL(product);

// 64 x 64 results are large enough for the hardware to order two Mmads by itself.
void large_product(GM_ADDR a, GM_ADDR b, GM_ADDR c) { Product(a, b, c, 64, kNothing); }
ASCENDC_MODEL_KERNEL(large_product);

// One row: the cube reads A as a row, not as fractals. `broken` leaves it as fractals of 16 rows.
void gemv(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(int32_t);
    GET_TILING_DATA_WITH_STRUCT(int32_t, broken, tiling);
    GlobalTensor<half> aGm, bGm;
    GlobalTensor<float> cGm;
    aGm.SetGlobalBuffer((__gm__ half*)a, 32);
    bGm.SetGlobalBuffer((__gm__ half*)b, 32 * 16);
    cGm.SetGlobalBuffer((__gm__ float*)c, 16);
    TPipe pipe;
    TBuf<TPosition::A1> l1;
    TBuf<TPosition::A2> l0a;
    TBuf<TPosition::B2> l0b;
    TBuf<TPosition::CO1> l0c;
    pipe.InitBuffer(l1, 2048);
    pipe.InitBuffer(l0a, 1024);
    pipe.InitBuffer(l0b, 1024);
    pipe.InitBuffer(l0c, 1024);
    const LocalTensor<half> a1 = l1.Get<half>(512), b1 = l1.Get<half>()[512];
    DataCopy(a1, aGm, Nd2NzParams(1, 1, 32, 0, 32, broken ? 16 : 1, 1, 0));
    DataCopy(b1, bGm, Nd2NzParams(1, 16, 32, 0, 32, 16, 1, 0));
    Order<HardEvent::MTE2_MTE1>(false);
    LoadData(l0a.Get<half>(), a1, LoadData2DParams(0, broken ? 2 : 1, 1, 0, 0, false, 0));
    LoadData(l0b.Get<half>(), b1, LoadData2DParams(0, 2, 1, 0, 0, false, 0));
    Order<HardEvent::MTE1_M>(false);
    MmadParams mmad;
    mmad.m = 1;
    mmad.n = 16;
    mmad.k = 32;
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), mmad);
    Order<HardEvent::M_FIX>(false);
    FixpipeParamsV220 fix;
    fix.mSize = 1;
    fix.nSize = fix.srcStride = fix.dstStride = 16;
    Fixpipe(cGm, l0c.Get<float>(), fix);
}
ASCENDC_MODEL_KERNEL(gemv);
