// One kernel for each rule: `bad` breaks that rule and no other; without `bad` the kernel is correct.
#pragma once

#include "kernel_operator.h"
#include "model/python_entry.h"

using namespace AscendC;

using In = TQue<TPosition::VECIN, 1>;

struct Env {
    Env(GM_ADDR xAddress, GM_ADDR yAddress, GM_ADDR tiling)
    {
        REGISTER_TILING_DEFAULT(int32_t);
        GET_TILING_DATA_WITH_STRUCT(int32_t, flag, tiling);
        bad = flag != 0;
        x.SetGlobalBuffer((__gm__ float*)xAddress, 1024);
        y.SetGlobalBuffer((__gm__ float*)yAddress, 1024);
    }

    // n floats of 1 in the unified buffer.
    LocalTensor<float> Ones(int32_t n = 1024)
    {
        LocalTensor<float> tensor = Fresh<float>(n);
        Duplicate(tensor, 1.0f, n);
        return tensor;
    }

    template <class T>
    LocalTensor<T> Fresh(uint32_t n)
    {
        TBuf<> buffer;
        pipe.InitBuffer(buffer, n * sizeof(T));
        return buffer.Get<T>();
    }

    template <HardEvent event>
    static void Order()
    {
        SetFlag<event>(EVENT_ID0);
        WaitFlag<event>(EVENT_ID0);
    }

    void Store(const GlobalTensor<float>& to, const LocalTensor<float>& from, uint32_t n)
    {
        Order<HardEvent::V_MTE3>();
        DataCopy(to, from, n);
    }

    bool bad = false;
    TPipe pipe;
    GlobalTensor<float> x, y;
};

#define RULE(name)                                         \
    static void name##Body(Env& env);                      \
    static void name(GM_ADDR x, GM_ADDR y, GM_ADDR tiling) \
    {                                                      \
        Env env(x, y, tiling);                             \
        name##Body(env);                                   \
    }                                                      \
    ASCENDC_MODEL_KERNEL(name);                            \
    static void name##Body(Env& env)
