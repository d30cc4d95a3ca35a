#include <kvzap/program.hpp>

int main(int argc, char** argv) { return kvzap::run_program(argc, argv); }
