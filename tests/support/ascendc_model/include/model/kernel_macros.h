// Qualifiers, the core's identity, and the tiling macros.
#pragma once

#include "core.h"

#define __aicore__
#define __global__
#define __gm__
#define __inout_pipe__(pipe)
#define GM_ADDR uint8_t*

#define ASCEND_IS_AIC (::ascendc_model::Me().cube)
#define ASCEND_IS_AIV (!::ascendc_model::Me().cube)

#define REGISTER_TILING_DEFAULT(TILING_STRUCT) using AscendcModelTiling [[maybe_unused]] = TILING_STRUCT
// CANN's compiler lays out the tiling of a plain structure only where one is registered: without that this has no type.
#define GET_TILING_DATA_WITH_STRUCT(struct_name, tiling_data, tiling_arg)               \
    static_assert(sizeof(AscendcModelTiling) > 0, "REGISTER_TILING_DEFAULT is needed"); \
    struct_name tiling_data;                                                            \
    ::ascendc_model::CopyTiling(&tiling_data, tiling_arg, sizeof(struct_name))
#define GET_TILING_DATA(tiling_data, tiling_arg) \
    GET_TILING_DATA_WITH_STRUCT(AscendcModelTiling, tiling_data, tiling_arg)
#define TILING_KEY_IS(key) (::ascendc_model::TheDevice().options.tilingKey == (key))
#define KERNEL_TASK_TYPE_DEFAULT(value) ::ascendc_model::CheckKernelType(value)
#define KERNEL_TASK_TYPE(key, value)                 \
    do {                                             \
        if (TILING_KEY_IS(key)) {                    \
            ::ascendc_model::CheckKernelType(value); \
        }                                            \
    } while (false)

namespace ascendc_model {

inline GmBuffer* FindGm(const void* address)
{
    for (GmBuffer& buffer : *TheDevice().gm) {
        if (buffer.Holds(address)) {
            return &buffer;
        }
    }
    return nullptr;
}

inline void CopyTiling(void* data, const uint8_t* tiling, size_t bytes)
{
    const GmBuffer* buffer = FindGm(tiling);
    if (buffer == nullptr || tiling != buffer->data() || buffer->bytes() != bytes) {
        Refuse("GET_TILING_DATA", "the structure has ", bytes, " bytes, the launch passed ",
            buffer == nullptr ? 0 : buffer->bytes());
    }
    std::memcpy(data, tiling, bytes);
}

inline void CheckKernelType(KernelMetaType type)
{
    if (type != TheDevice().options.kernelType) {
        Refuse("KERNEL_TASK_TYPE", "the kernel asks for type ", type, ", the launch is of type ",
            TheDevice().options.kernelType);
    }
}

}  // namespace ascendc_model

namespace AscendC {

inline int64_t GetBlockIdx() { return ascendc_model::Me().blockIdx; }
inline int64_t GetBlockNum() { return ascendc_model::TheDevice().options.blocks; }
inline int64_t GetSubBlockIdx() { return ascendc_model::Me().subBlock; }
inline int64_t GetSubBlockNum() { return ascendc_model::Me().perBlock; }
inline int64_t GetTaskRatio() { return ascendc_model::Me().perBlock; }
inline int64_t GetTaskRation() { return GetTaskRatio(); }  // the name in older documents

// The system's part of the workspace is empty here.
inline GM_ADDR GetUserWorkspace(GM_ADDR workspace) { return workspace; }

}  // namespace AscendC
