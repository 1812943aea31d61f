// Products on a cube core whose results are compared with NumPy's.
#pragma once

#include "kernel_operator.h"
#include "model/python_entry.h"

using namespace AscendC;

// C = A B or A B^T on one cube core, K in one or two steps.
struct ProductTiling {
    uint32_t m, n, k;
    uint32_t kStep;
    uint32_t transposed;  // B is given as [n, k]
};

template <class T, class Out>
void Product(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR tiling)
{
    REGISTER_TILING_DEFAULT(ProductTiling);
    GET_TILING_DATA_WITH_STRUCT(ProductTiling, t, tiling);
    const uint32_t m16 = (t.m + 15) / 16, n16 = (t.n + 15) / 16;
    GlobalTensor<T> aGm, bGm;
    GlobalTensor<Out> cGm;
    aGm.SetGlobalBuffer((__gm__ T*)a, t.m * t.k);
    bGm.SetGlobalBuffer((__gm__ T*)b, t.k * t.n);
    cGm.SetGlobalBuffer((__gm__ Out*)c, t.m * t.n);
    TPipe pipe;
    TQue<TPosition::A1, 1> a1Queue;
    TQue<TPosition::B1, 1> b1Queue;
    TQue<TPosition::A2, 1> a2Queue;
    TQue<TPosition::B2, 1> b2Queue;
    TQue<TPosition::CO1, 1> cQueue;
    const uint32_t step16 = (t.kStep + 15) / 16;
    pipe.InitBuffer(a1Queue, 2, m16 * step16 * 512);
    pipe.InitBuffer(b1Queue, 2, n16 * step16 * 512);
    pipe.InitBuffer(a2Queue, 2, m16 * step16 * 512);
    pipe.InitBuffer(b2Queue, 2, n16 * step16 * 512);
    pipe.InitBuffer(cQueue, 1, m16 * n16 * 1024);
    LocalTensor<float> sum = cQueue.AllocTensor<float>();
    for (uint32_t at = 0; at < t.k; at += t.kStep) {
        const uint32_t k = std::min(t.kStep, t.k - at);
        const uint32_t k16 = (k + 15) / 16;
        LocalTensor<T> a1 = a1Queue.AllocTensor<T>();
        LocalTensor<T> b1 = b1Queue.AllocTensor<T>();
        if (t.m == 1) {
            // GEMV reads the row as it is.
            DataCopy(a1, aGm[at], Nd2NzParams(1, 1, k, 0, t.k, 1, 1, 0));
        } else {
            DataCopy(a1, aGm[at], Nd2NzParams(1, t.m, k, 0, t.k, m16 * 16, 1, 0));
        }
        if (t.transposed) {
            DataCopy(b1, bGm[at], Nd2NzParams(1, t.n, k, 0, t.k, n16 * 16, 1, 0));
        } else {
            DataCopy(b1, bGm[at * t.n], Nd2NzParams(1, k, t.n, 0, t.n, k16 * 16, 1, 0));
        }
        a1Queue.EnQue(a1);
        b1Queue.EnQue(b1);
        a1 = a1Queue.DeQue<T>();
        b1 = b1Queue.DeQue<T>();
        LocalTensor<T> a2 = a2Queue.AllocTensor<T>();
        LocalTensor<T> b2 = b2Queue.AllocTensor<T>();
        if (t.m == 1) {
            LoadData(a2, a1, LoadData2DParams(0, (k16 + 15) / 16, 1, 0, 0, false, 0));
        } else {
            for (uint32_t row = 0; row < m16; ++row) {
                LoadData(a2[row * k16 * 256], a1[row * 256], LoadData2DParams(0, k16, m16, 0, 0, false, 0));
            }
        }
        if (t.transposed) {
            LoadData(b2, b1, LoadData2DParams(0, k16 * n16, 1, 0, 0, false, 0));
        } else {
            LoadData2dTransposeParams turn;
            turn.repeatTimes = n16;
            turn.srcStride = k16;
            for (uint32_t row = 0; row < k16; ++row) {
                if (row % 2 == 0) {  // two calls with the same effect
                    LoadData(b2[row * n16 * 256], b1[row * 256], LoadData2DParams(0, n16, k16, 0, 0, true, 0));
                } else {
                    LoadDataWithTranspose(b2[row * n16 * 256], b1[row * 256], turn);
                }
            }
        }
        a2Queue.EnQue(a2);
        b2Queue.EnQue(b2);
        a1Queue.FreeTensor(a1);
        b1Queue.FreeTensor(b1);
        a2 = a2Queue.DeQue<T>();
        b2 = b2Queue.DeQue<T>();
        MmadParams mmad;
        mmad.m = t.m;
        mmad.n = t.n;
        mmad.k = k;
        mmad.cmatrixInitVal = at == 0;
        Mmad(sum, a2, b2, mmad);
        PipeBarrier<PIPE_M>();
        a2Queue.FreeTensor(a2);
        b2Queue.FreeTensor(b2);
    }
    cQueue.EnQue(sum);
    sum = cQueue.DeQue<float>();
    FixpipeParamsV220 fix;
    fix.nSize = t.n;
    fix.mSize = t.m;
    fix.srcStride = m16 * 16;
    fix.dstStride = t.n;
    fix.quantPre = std::is_same_v<Out, half> ? F322F16 : std::is_same_v<Out, bfloat16_t> ? F322BF16 : NoQuant;
    Fixpipe(cGm, sum, fix);
    cQueue.FreeTensor(sum);
}
void product_half(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR t) { Product<half, float>(a, b, c, t); }
void product_bf16(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR t) { Product<bfloat16_t, float>(a, b, c, t); }
void product_half_half(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR t) { Product<half, half>(a, b, c, t); }
void product_bf16_bf16(GM_ADDR a, GM_ADDR b, GM_ADDR c, GM_ADDR t) { Product<bfloat16_t, bfloat16_t>(a, b, c, t); }
ASCENDC_MODEL_KERNEL(product_half);
ASCENDC_MODEL_KERNEL(product_bf16);
ASCENDC_MODEL_KERNEL(product_half_half);
ASCENDC_MODEL_KERNEL(product_bf16_bf16);
