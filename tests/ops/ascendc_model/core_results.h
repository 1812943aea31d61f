// Kernels in which several cores work together, whose results are compared with NumPy's.
#pragma once

#include "kernel_operator.h"
#include "model/python_entry.h"

using namespace AscendC;

// y += x * (core + 1) from every core, by atomic addition.
template <class T>
void Accumulate(GM_ADDR x, GM_ADDR y)
{
    GlobalTensor<T> xGm, yGm;
    xGm.SetGlobalBuffer((__gm__ T*)x, 64);
    yGm.SetGlobalBuffer((__gm__ T*)y, 64);
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 1, 256);
    pipe.InitBuffer(out, 1, 256);
    LocalTensor<T> a = in.AllocTensor<T>();
    DataCopy(a, xGm, 64);
    in.EnQue(a);
    a = in.DeQue<T>();
    LocalTensor<T> b = out.AllocTensor<T>();
    Muls(b, a, T(static_cast<float>(GetBlockIdx() + 1)), 64);
    out.EnQue(b);
    in.FreeTensor(a);
    b = out.DeQue<T>();
    SetAtomicAdd<T>();
    DataCopy(yGm, b, 64);
    SetAtomicNone();
    out.FreeTensor(b);
}
void accumulate_half(GM_ADDR x, GM_ADDR y) { Accumulate<half>(x, y); }
void accumulate_float(GM_ADDR x, GM_ADDR y) { Accumulate<float>(x, y); }
ASCENDC_MODEL_KERNEL(accumulate_half);
ASCENDC_MODEL_KERNEL(accumulate_float);

// Mix 1:2: the cube squares a 32 x 16 matrix times its transpose into a workspace, each vector core doubles half of the
// rows, and the cube reads nothing before its vector cores have signalled that they are ready.
void mix(GM_ADDR x, GM_ADDR work, GM_ADDR y)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    constexpr uint32_t kRows = 32, kDepth = 16;
    const int64_t block = GetBlockIdx() / GetTaskRatio();
    GlobalTensor<half> xGm;
    GlobalTensor<float> workGm, yGm;
    xGm.SetGlobalBuffer((__gm__ half*)x + block * kRows * kDepth, kRows * kDepth);
    workGm.SetGlobalBuffer((__gm__ float*)work + block * kRows * kRows, kRows * kRows);
    yGm.SetGlobalBuffer((__gm__ float*)y + block * kRows * kRows, kRows * kRows);
    TPipe pipe;
    if ASCEND_IS_AIC {
        TBuf<TPosition::A1> l1;
        TBuf<TPosition::A2> l0a;
        TBuf<TPosition::B2> l0b;
        TBuf<TPosition::CO1> l0c;
        pipe.InitBuffer(l1, kRows * kDepth * 2);
        pipe.InitBuffer(l0a, kRows * kDepth * 2);
        pipe.InitBuffer(l0b, kRows * kDepth * 2);
        pipe.InitBuffer(l0c, kRows * kRows * 4);
        CrossCoreWaitFlag(3);
        DataCopy(l1.Get<half>(), xGm, Nd2NzParams(1, kRows, kDepth, 0, kDepth, kRows, 1, 0));
        SetFlag<HardEvent::MTE2_MTE1>(EVENT_ID0);
        WaitFlag<HardEvent::MTE2_MTE1>(EVENT_ID0);
        LoadData(l0a.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 2, 1, 0, 0, false, 0));
        LoadData(l0b.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 2, 1, 0, 0, false, 0));
        SetFlag<HardEvent::MTE1_M>(EVENT_ID0);
        WaitFlag<HardEvent::MTE1_M>(EVENT_ID0);
        MmadParams mmad;
        mmad.m = mmad.n = kRows;
        mmad.k = kDepth;
        Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), mmad);
        SetFlag<HardEvent::M_FIX>(EVENT_ID0);
        WaitFlag<HardEvent::M_FIX>(EVENT_ID0);
        FixpipeParamsV220 fix;
        fix.nSize = fix.mSize = fix.srcStride = kRows;
        fix.dstStride = kRows;
        Fixpipe(workGm, l0c.Get<float>(), fix);
        CrossCoreSetFlag<2, PIPE_FIX>(5);
    }
    if ASCEND_IS_AIV {
        constexpr uint32_t kPart = kRows * kRows / 2;
        TBuf<TPosition::VECCALC> calc;
        pipe.InitBuffer(calc, kPart * sizeof(float));
        LocalTensor<float> part = calc.Get<float>();
        CrossCoreSetFlag<2, PIPE_MTE3>(3);
        CrossCoreWaitFlag(5);
        DataCopy(part, workGm[GetSubBlockIdx() * kPart], kPart);
        SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
        WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
        Muls(part, part, 2.0f, kPart);
        SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
        WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
        DataCopy(yGm[GetSubBlockIdx() * kPart], part, kPart);
    }
}
ASCENDC_MODEL_KERNEL(mix);

// Each core writes its square, all synchronize, each reads its neighbour's. The scalar unit writes the numbers.
void neighbours(GM_ADDR work, GM_ADDR y)
{
    const int64_t me = GetBlockIdx();
    GlobalTensor<int32_t> workGm, yGm;
    workGm.SetGlobalBuffer((__gm__ int32_t*)work, GetBlockNum() * 8);
    yGm.SetGlobalBuffer((__gm__ int32_t*)y, GetBlockNum() * 8);
    TPipe pipe;
    TBuf<> calc;
    pipe.InitBuffer(calc, 64);
    LocalTensor<int32_t> mine = calc.Get<int32_t>();
    Duplicate(mine, static_cast<int32_t>(me), 8);
    mine.SetValue(0, mine.GetValue(1) * mine.GetValue(1));
    const TEventID event = pipe.AllocEventID<HardEvent::V_MTE3>();
    SetFlag<HardEvent::V_MTE3>(event);
    WaitFlag<HardEvent::V_MTE3>(event);
    pipe.ReleaseEventID<HardEvent::V_MTE3>(event);
    DataCopy(workGm[me * 8], mine, 8);
    SyncAll();
    DataCopy(mine[8], workGm[(me + 1) % GetBlockNum() * 8], 8);
    const TEventID fetched = GetTPipePtr()->FetchEventID(HardEvent::MTE2_MTE3);
    SetFlag<HardEvent::MTE2_MTE3>(fetched);
    WaitFlag<HardEvent::MTE2_MTE3>(fetched);
    DataCopy(yGm[me * 8], mine[8], 8);
}
ASCENDC_MODEL_KERNEL(neighbours);
