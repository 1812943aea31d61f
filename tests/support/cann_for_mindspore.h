// What MindSpore's Ascend headers take from CANN's, for a check of the syntax of ops/ascendc_common/pynative.cc. Types
// are empty and nothing is defined.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

typedef int aclError;
typedef void* aclrtContext;
typedef void* aclrtStream;
typedef void* aclrtEvent;
typedef void* aclrtDrvMemHandle;
typedef void* HcclComm;
struct aclDataBuffer;
struct aclTensorDesc;
struct aclopAttr;
struct aclrtExceptionInfo;
struct aclrtPhysicalMemProp;
struct aclrtMemUceInfo;
typedef void (*aclrtCallback)(void*);
typedef void (*aclrtExceptionInfoCallback)(aclrtExceptionInfo*);
enum aclDataType { ACL_DT_UNDEFINED = -1, ACL_FLOAT, ACL_INT64 = 9 };
enum aclFormat {
    ACL_FORMAT_UNDEFINED = -1,
    ACL_FORMAT_NCHW,
    ACL_FORMAT_ND = 2,
    ACL_FORMAT_FRACTAL_NZ = 29,
    ACL_FORMAT_NCDHW = 30,
    ACL_FORMAT_NCL = 47
};
enum aclMemType {};
enum aclSysParamOpt {};
enum aclrtRunMode {};
enum aclrtMemAttr {};
enum aclrtMemMallocPolicy {};
enum aclrtMemcpyKind {};
enum aclrtCallbackBlockType {};
enum aclrtEventRecordedStatus {};
enum aclrtFloatOverflowMode {};
enum aclrtStreamStatus {};
enum aclrtMemHandleType {};
enum aclrtLastErrLevel {};
enum aclrtDevResLimitType {};
constexpr int ACL_SUCCESS = 0;

namespace ge {
enum DataType {
    DT_FLOAT,
    DT_FLOAT16,
    DT_INT8,
    DT_INT16,
    DT_UINT16,
    DT_UINT8,
    DT_INT32,
    DT_INT64,
    DT_UINT32,
    DT_UINT64,
    DT_BOOL,
    DT_DOUBLE,
    DT_STRING,
    DT_DUAL_SUB_INT8,
    DT_DUAL_SUB_UINT8,
    DT_COMPLEX64,
    DT_COMPLEX128,
    DT_DUAL,
    DT_QINT8,
    DT_QINT16,
    DT_QINT32,
    DT_QUINT8,
    DT_QUINT16,
    DT_RESOURCE,
    DT_STRING_REF,
    DT_VARIANT,
    DT_UNDEFINED,
    DT_INT4,
    DT_UINT1,
    DT_INT2,
    DT_UINT2,
    DT_BF16,
    DT_COMPLEX32,
    DT_HIFLOAT8,
    DT_FLOAT8_E5M2,
    DT_FLOAT8_E4M3FN
};
enum Format { FORMAT_ND };
using graphStatus = uint32_t;
class Shape {};
class Tensor {};
class TensorDesc {};
class Graph {};
class AscendString {};
class Allocator;
using AllocatorPtr = std::shared_ptr<Allocator>;
class Operator {
public:
    using InferFunc = std::function<graphStatus(Operator&)>;
    explicit Operator(const std::string&);
    Operator(const std::string&, const std::string&);
    std::string GetName() const;
    virtual ~Operator();
    void InputRegister(const std::string&);
    void OptionalInputRegister(const std::string&);
    void OutputRegister(const std::string&);
    void RequiredAttrRegister(const std::string&);
    void InferFuncRegister(const InferFunc&);
};
class OperatorFactory {
public:
    static Operator CreateOperator(const std::string&, const std::string&);
    static bool IsExistOp(const std::string&);
};
}  // namespace ge
