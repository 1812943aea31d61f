// Calls the functions of the CPU library as MindSpore does, in a process of its own, so that it can be built for
// another processor and run by an emulator. Like Python, it is linked without OpenMP and opens the library late.
//   operator_process LIBRARY FIRST...      opens what comes FIRST, as far as it can, then the library
// operator_process.py writes requests to its standard input, and reads the answers from its standard output:
//   int NAME ARGUMENT    the number that int NAME(int) returns
//   call NAME COUNT      what InferShape, InferType and NAME itself return or refuse, then the bytes of every tensor.
//                        Each of the COUNT tensors follows in the request: DTYPE START BYTES RANK DIMENSIONS..., a line
//                        feed and its bytes, in which the tensor begins at START
#include <dlfcn.h>

#include <cstdint>
#include <exception>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Tensor {
    std::string dtype;
    int64_t start;
    std::vector<int64_t> shape;
    std::vector<char> bytes;
};

template <class Function>
Function* Find(void* library, const std::string& name)
{
    void* symbol = dlsym(library, name.c_str());
    if (symbol == nullptr) throw std::runtime_error(dlerror());
    return reinterpret_cast<Function*>(symbol);
}

Tensor ReadTensor()
{
    Tensor tensor;
    int64_t bytes, rank;
    std::cin >> tensor.dtype >> tensor.start >> bytes >> rank;
    tensor.shape.resize(rank);
    for (int64_t& dimension : tensor.shape) std::cin >> dimension;
    std::cin.ignore();
    tensor.bytes.resize(bytes);
    std::cin.read(tensor.bytes.data(), bytes);
    return tensor;
}

// Writes a line: what f returns, or the message of its exception.
template <class F>
void Answer(F f)
{
    try {
        std::cout << f() + '\n';
    } catch (const std::exception& error) {
        std::cout << "refused " << error.what() << '\n';
    }
}

void Call(void* library)
{
    std::string name;
    int count;
    std::cin >> name >> count;
    std::vector<Tensor> tensors;
    for (int i = 0; i < count; ++i) tensors.push_back(ReadTensor());
    std::vector<void*> data;
    std::vector<int> ndims;
    std::vector<int64_t*> shapes;
    std::vector<const char*> dtypes;
    for (Tensor& tensor : tensors) {
        data.push_back(tensor.bytes.data() + tensor.start);
        ndims.push_back(static_cast<int>(tensor.shape.size()));
        shapes.push_back(tensor.shape.data());
        dtypes.push_back(tensor.dtype.c_str());
    }
    Answer([&] {
        const auto infer = Find<std::vector<int64_t>(int*, int64_t**, void*)>(library, name + "InferShape");
        std::string line = "shape";
        for (const int64_t dimension : infer(ndims.data(), shapes.data(), nullptr)) {
            line += ' ' + std::to_string(dimension);
        }
        return line;
    });
    Answer([&] {
        // Each input has a type of its own, so that the answer says whose type the output has.
        std::vector<int> types(count - 1);
        std::iota(types.begin(), types.end(), 0);
        const auto infer = Find<int(std::vector<int>, void*)>(library, name + "InferType");
        return "type " + std::to_string(infer(types, nullptr));
    });
    Answer([&] {
        const auto kernel = Find<int(int, void**, int*, int64_t**, const char**, void*, void*)>(library, name);
        const int code = kernel(count, data.data(), ndims.data(), shapes.data(), dtypes.data(), nullptr, nullptr);
        return "code " + std::to_string(code);
    });
    for (const Tensor& tensor : tensors) std::cout.write(tensor.bytes.data(), tensor.bytes.size());
}

}  // namespace

int main(int count, char** arguments)
{
    for (int i = 2; i < count; ++i) dlopen(arguments[i], RTLD_NOW);
    void* const library = dlopen(arguments[1], RTLD_LAZY | RTLD_LOCAL);
    std::cout << (library == nullptr ? dlerror() : "opened") << std::endl;
    for (std::string request, name; std::cin >> request; std::cout.flush()) {
        if (request == "call") {
            Call(library);
        } else {
            int argument;
            std::cin >> name >> argument;
            Answer([&] { return "int " + std::to_string(Find<int(int)>(library, name)(argument)); });
        }
    }
    return 0;
}
