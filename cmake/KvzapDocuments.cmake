# Runs the program that was just built to print its man page and completion scripts. In a cross
# build the program may not run: then they are omitted, and the build continues.
#   cmake -DPROGRAM=... -DFOLDER=... [-DPYTHON=... -DSOURCE=... -DVERSION=...] -P KvzapDocuments.cmake
foreach(document "manual|kvzap.1" "completion;bash|kvzap.bash" "completion;zsh|_kvzap"
        "completion;fish|kvzap.fish")
  string(REPLACE "|" ";" parts "${document}")
  list(POP_BACK parts file)
  execute_process(COMMAND ${PROGRAM} ${parts} RESULT_VARIABLE result OUTPUT_VARIABLE text
                  ERROR_VARIABLE errors)
  if(NOT result EQUAL 0)
    message(WARNING "No man page and no shell completion: ${PROGRAM} does not run here. ${errors}")
    file(REMOVE ${FOLDER}/kvzap.1 ${FOLDER}/kvzap.bash ${FOLDER}/_kvzap
         ${FOLDER}/kvzap.fish)
    break()
  endif()
  file(WRITE ${FOLDER}/${file} "${text}")
endforeach()
# Documents of kvzap-plot, from the table of its options.
if(PYTHON)
  execute_process(COMMAND ${PYTHON} ${SOURCE}/cmake/plot_documents.py ${SOURCE}/drivers/kvzap_plot.py
                          ${FOLDER} ${VERSION}
                  RESULT_VARIABLE result ERROR_VARIABLE errors)
  if(NOT result EQUAL 0)
    message(WARNING "No man page and no shell completion of kvzap-plot: ${errors}")
    file(REMOVE ${FOLDER}/kvzap-plot.1 ${FOLDER}/kvzap-plot.bash ${FOLDER}/_kvzap-plot
         ${FOLDER}/kvzap-plot.fish)
  endif()
endif()
file(WRITE ${FOLDER}/stamp "")
