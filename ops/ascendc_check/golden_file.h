// Golden files: the tensors of one call of an operator, as golden.py writes them.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "acl/acl.h"

namespace mindlora {

// What a program was given cannot be used, or the device cannot: the program ends.
struct Unusable : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct GoldenTensor {
    std::string name;
    std::string dtype;
    aclDataType type = ACL_FLOAT;
    std::vector<int64_t> shape;
    std::vector<char> before;  // before the call; an output holds NaN or a large integer
    // Between which numbers those after the call must be; empty for an input, whose bytes must stay.
    std::vector<double> lowest, highest;

    size_t Count() const
    {
        size_t count = 1;
        for (int64_t size : shape) count *= static_cast<size_t>(size);
        return count;
    }
};

struct DataType {
    aclDataType type;
    size_t bytes;
};

inline const std::map<std::string, DataType>& DataTypes()
{
    static const std::map<std::string, DataType> types = {{"float32", {ACL_FLOAT, 4}}, {"float16", {ACL_FLOAT16, 2}},
        {"bfloat16", {ACL_BF16, 2}}, {"int32", {ACL_INT32, 4}}, {"uint8", {ACL_UINT8, 1}}};
    return types;
}

inline void ReadBlock(std::ifstream& file, const std::string& path, void* into, size_t bytes)
{
    if (!file.read(static_cast<char*>(into), static_cast<std::streamsize>(bytes))) {
        throw Unusable(path + " is cut off: write it again with golden.py");
    }
}

// A line: role (in, out or inout), name, dtype, and shape with commas.
inline GoldenTensor ReadLine(const std::string& line, const std::string& path, std::string& role)
{
    GoldenTensor tensor;
    std::istringstream words(line);
    std::string sizes, size;
    words >> role >> tensor.name >> tensor.dtype >> sizes;
    const auto found = DataTypes().find(tensor.dtype);
    const bool known = role == "in" || role == "out" || role == "inout";
    if (!words || !known || found == DataTypes().end()) throw Unusable(path + " has a line that is no tensor: " + line);
    tensor.type = found->second.type;
    for (std::istringstream list(sizes); std::getline(list, size, ',');) tensor.shape.push_back(std::stoll(size));
    return tensor;
}

// The tensors of a file, in its order.
inline std::vector<GoldenTensor> ReadGolden(const std::string& path)
{
    std::ifstream file(path, std::ios::binary);
    if (!file) throw Unusable(path + " cannot be read");
    std::string line;
    if (!std::getline(file, line) || line != "golden file 2") throw Unusable(path + " is not a golden file");
    std::vector<GoldenTensor> tensors;
    std::vector<std::string> roles;
    while (std::getline(file, line) && !line.empty()) {
        std::string role;
        tensors.push_back(ReadLine(line, path, role));
        roles.push_back(role);
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
        GoldenTensor& tensor = tensors[i];
        const char poison = static_cast<char>(tensor.type == ACL_INT32 ? 0x7F : 0xFF);
        tensor.before.assign(tensor.Count() * DataTypes().at(tensor.dtype).bytes, poison);
        if (roles[i] != "out") ReadBlock(file, path, tensor.before.data(), tensor.before.size());
        if (roles[i] == "in") continue;
        for (std::vector<double>* end : {&tensor.lowest, &tensor.highest}) {
            end->resize(tensor.Count());
            ReadBlock(file, path, end->data(), end->size() * sizeof(double));
        }
    }
    return tensors;
}

}  // namespace mindlora
